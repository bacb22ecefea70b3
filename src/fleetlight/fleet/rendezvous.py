# SPDX-License-Identifier: Apache-2.0
"""How the processes of a job with parameter servers meet, where variables do not say everything."""

from __future__ import annotations

import functools
import itertools
import socket
from collections.abc import Sequence

import msgspec

from fleetlight.collective.forming import hello_of, own_address
from fleetlight.errors import RoleError
from fleetlight.observe.log import logger
from fleetlight.ps import messages as m
from fleetlight.ps.rendezvous.client import RendezvousClient, random_name
from fleetlight.ps.rendezvous.service import JobSize, RendezvousService
from fleetlight.ps.transport.channel import SocketChannel, connect_all
from fleetlight.ps.transport.interface import Channel, MemoryChannel
from fleetlight.ps.transport.listener import bind
from fleetlight.roles import Role
from fleetlight.roles.role import Endpoint, Kind
from fleetlight.security.context import Contexts
from fleetlight.version import VERSION
from fleetlight.wire.listening import listen_at, ways_to

#: how much longer a member waits than the rendezvous, which can name the missing members
_GRACE_S = 5.0
#: shorter attempts to reach the rendezvous are not reported
_QUIET_S = 5.0


def size_of(role: Role) -> JobSize:
    """What the members of this job must agree on."""
    return JobSize(VERSION, role.job, role.worker_num, role.server_num)


def keeps_rendezvous(role: Role) -> bool:
    """True in the server that keeps the rendezvous: server 0 where there is no scheduler."""
    return role.is_server and role.index == 0 and not role.master_is_outside


def rendezvous_of(
    role: Role, deadline_s: float, tls: Contexts | None, own: RendezvousService | None = None
) -> RendezvousClient:
    """Asks the rendezvous of the job; `own` is that in this process."""
    endpoint = _rendezvous_endpoint(role)
    hello = hello_of(role.replace(master=endpoint), VERSION)
    attend = m.Attend(
        role.job, role.worker_num, role.server_num, random_name(), hello, role.join is not None
    )
    if own is not None:
        return RendezvousClient(functools.partial(_attend_here, own), attend, deadline_s)
    connect = functools.partial(_attend_at, endpoint, role, deadline_s, tls)
    return RendezvousClient(connect, attend, deadline_s)


def held_socket(role: Role) -> socket.socket:
    """The socket at which a server will listen, whose port it announces."""
    if not keeps_rendezvous(role):
        return bind((own_address(role), 0))
    held, _ = listen_at(_rendezvous_endpoint(role))
    held.setblocking(False)
    return held


def with_own_index(role: Role) -> Role:
    """The role with the index that this process knows itself, if any.

    A restarted process must not wait until all others enrol again.
    """
    counts = {Kind.WORKER: role.worker_num, Kind.SERVER: role.server_num}
    if role.index is not None or role.node_id is None or not role.node_id.isdigit():
        return role
    index = int(role.node_id)
    return role.replace(index=index) if index < counts[role.kind] else role


def placed(role: Role, enrolled: m.Enrolled) -> Role:
    """The role with its index, and with its place among the hosts where no variable says it."""
    facts = {"index": enrolled.index, **msgspec.structs.asdict(enrolled.place)}
    return role.replace(**{k: v for k, v in facts.items() if getattr(role, k) is None})


def endpoints_of(located: m.Located) -> tuple[Endpoint, ...]:
    """The endpoints of all servers."""
    return tuple((entry.host, entry.port) for entry in located.servers)


def _rendezvous_endpoint(role: Role) -> Endpoint:
    endpoint = role.server_endpoints[0] if role.server_endpoints else role.master
    if endpoint is None:
        raise RoleError(
            f"{role.dialect}: the job has {role.server_num} parameter servers, but no variable "
            "says where they listen, or where the job meets; give FLEET_MASTER, the same host:port "
            "to all processes, or the address of each server (FLEET_SERVER_ENDPOINTS, or "
            "PADDLE_PSERVERS_IP_PORT_LIST)"
        )
    return endpoint


def _attend_here(point: RendezvousService, attend: m.Attend, within_s: float) -> Channel:
    channel = MemoryChannel(point, "the rendezvous (in this process)")
    channel.call(attend)
    return channel


def _attend_at(
    endpoint: Endpoint,
    role: Role,
    deadline_s: float,
    tls: Contexts | None,
    attend: m.Attend,
    within_s: float,
) -> Channel:
    ways = itertools.cycle(ways_to(endpoint))
    keeper = "the scheduler" if role.master_is_outside else "server 0, where the job meets"
    channel = SocketChannel(
        lambda: next(ways),
        keeper,
        deadline_s=deadline_s + _GRACE_S,
        tls=None if tls is None else tls.as_client,
        token=role.token,
        greeting=lambda: attend,
    )
    connect_all([channel], within_s, _report_not_ready if within_s > _QUIET_S else None)
    return channel


def _report_not_ready(missing: Sequence[str]) -> None:
    logger.info("not ready endpoints: %s", missing)
