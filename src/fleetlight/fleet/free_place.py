# SPDX-License-Identifier: Apache-2.0
"""A worker that joins a running job gets a place, and learns what the job is."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import torch

from fleetlight.errors import DeadlineError, MembershipError
from fleetlight.observe.log import logger
from fleetlight.ps import messages as m
from fleetlight.ps.transport.channel import SocketChannel, connect_all
from fleetlight.roles import Role, endpoint_text
from fleetlight.roles.role import Endpoint
from fleetlight.security.context import Contexts
from fleetlight.version import VERSION
from fleetlight.wire.listening import ways_to


@dataclasses.dataclass(frozen=True)
class RunningJobFacts:
    """What a worker that joins learns of the job."""

    #: the role with a place in it
    role: Role
    #: True if its servers announce themselves
    announces: bool
    #: the folder of its checkpoints; "" if it saves nothing
    checkpoint: str


def facts_of_running_job(
    role: Role, deadline_s: float, tls: Contexts | None, started_at: int
) -> RunningJobFacts:
    """Get a place in the running job, and what this worker must know of it."""
    endpoint = master = _endpoint(role)
    reply = _asked(endpoint, role, deadline_s, tls, started_at)
    keeper = None
    if isinstance(reply, m.Located):
        # a scheduler keeps the rendezvous, and server 0 the places
        first = next((one for one in reply.servers if one.server == 0), None)
        if first is None:
            raise MembershipError(
                f"the scheduler at {endpoint_text(endpoint)} does not know yet where server 0 "
                "listens; join once the job trains"
            )
        endpoint, keeper = (first.host, first.port), "the scheduler"
        reply = _asked(endpoint, role, deadline_s, tls, started_at)
    if not isinstance(reply, m.FreePlace):
        raise MembershipError(
            f"{endpoint_text(endpoint)} sent {type(reply).__name__}, expected FreePlace; give "
            "FLEET_JOIN the host:port of server 0"
        )
    return RunningJobFacts(_placed(role, reply, master, keeper), reply.announces, reply.checkpoint)


def _placed(role: Role, place: m.FreePlace, master: Endpoint, keeper: str | None) -> Role:
    endpoints = tuple((host, port) for host, port in place.server_endpoints)
    return role.replace(
        index=place.worker,
        worker_num=place.worker_num,
        worker_max=place.worker_max,
        server_num=len(endpoints),
        server_endpoints=() if place.announces else endpoints,
        master=master,
        master_keeper=keeper,
        job=place.job,
        local_rank=role.local_rank or 0,
        local_size=role.local_size or 1,
        node_rank=0,
        node_num=1,
    )


def _endpoint(role: Role) -> Endpoint:
    assert role.join is not None
    return role.join


def _asked(
    endpoint: Endpoint, role: Role, deadline_s: float, tls: Contexts | None, started_at: int
) -> m.Message:
    """The reply to a request for a place."""
    ways = itertools.cycle(ways_to(endpoint))
    channel = SocketChannel(
        lambda: next(ways),
        "server 0 of the job to join",
        deadline_s=deadline_s,
        tls=None if tls is None else tls.as_client,
        token=role.token,
        greeting=lambda: m.PlaceRequest(VERSION, str(torch.__version__), started_at),
    )
    try:
        connect_all([channel], deadline_s, _report_not_ready)
    except DeadlineError as error:
        raise DeadlineError(
            f"{error}; the job may have ended, or server 0 listens elsewhere: its log has the "
            "address"
        ) from error
    welcome = channel.welcome
    channel.close()
    assert welcome is not None
    return welcome.message


def _report_not_ready(missing: Sequence[str]) -> None:
    logger.warning("the job to join does not reply yet: %s", missing)
