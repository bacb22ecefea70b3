# SPDX-License-Identifier: Apache-2.0
"""Takes this process into a job with parameter servers: as a server, as a worker, or as both."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import socket
import ssl
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

from fleetlight.collective.forming import enrol, own_address, report_failure
from fleetlight.collective.group import Group
from fleetlight.errors import PlanError, RoleError
from fleetlight.fleet.exit.exit_status import report_returning
from fleetlight.fleet.job import Job
from fleetlight.fleet.served.durable.durability_dir import redo_of, remains_of
from fleetlight.fleet.served.durable.replay import WorkerReplay
from fleetlight.fleet.served.durable.whole_resume import resume_with_all
from fleetlight.fleet.served.job import ServedJob
from fleetlight.fleet.served.session import ServerSession
from fleetlight.fleet.server.job import ServerJob, ServerProcess
from fleetlight.observe.log import logger
from fleetlight.ps import messages as m
from fleetlight.ps.server.server import Server
from fleetlight.ps.transport.channel import SocketChannel, connect_all
from fleetlight.ps.transport.interface import Channel, MemoryChannel, RetryPolicy
from fleetlight.ps.transport.listener import Listener, hold
from fleetlight.ps.transport.session import ConnectionLimits
from fleetlight.ps.worker.client import Client
from fleetlight.ps.worker.connections import CONTROL, PULL, PUSH, IncarnationFence
from fleetlight.ps.worker.replay.worker_journal import WorkerJournal
from fleetlight.ps.worker.served_group import ServedGroup
from fleetlight.roles import Role, endpoint_text
from fleetlight.roles.address import is_loopback
from fleetlight.security.context import Contexts
from fleetlight.security.token import OPEN
from fleetlight.strategy import DistributedStrategy
from fleetlight.version import VERSION

#: how much longer a worker listens than the server it has asked may wait for others
_GRACE_S = 5.0


#: how long a server may be away before a worker gives it up, where nobody starts it again
_AWAY_S = 5.0


class Start(NamedTuple):
    """What this process joins a job with."""

    role: Role
    strategy: DistributedStrategy
    deadline_s: float
    #: what connections are opened with; None: plain ones
    tls: Contexts | None = None


def join_servers(start: Start) -> Job:
    """What this process is in a job with parameter servers, or as one process alone."""
    role = start.role
    if role.is_server:
        return _serve(start)
    if role.worker_num > 1 and not role.server_num:
        raise RoleError(
            f"fleet.init(): the job has {role.worker_num} workers and no parameter servers "
            f"({role.dialect}); start it with servers (fleetrun --server_num 2 --worker_num "
            f"{role.worker_num}), or call fleet.init(is_collective=True)"
        )
    if role.index is None and role.master is not None:
        return _enrolled(start)
    return _train(start)


def _train(start: Start) -> ServedJob:
    return _work(start) if start.role.server_num else _alone(start)


def _enrolled(start: Start) -> ServedJob:
    """A worker whose index, and the way to the servers, a scheduler tells."""
    role, signs = enrol(start.role, VERSION, start.deadline_s, tls=start.tls)
    assert signs is not None
    try:
        job = _train(start._replace(role=role))
    except Exception as error:
        signs.depart(f"{type(error).__name__}: {error}")
        signs.release_store()
        raise
    job.session.signs = signs
    return job


def _serve(start: Start) -> ServerJob:
    """Listen from now on: workers can meet before the server knows what is trained."""
    give_back_freed()
    if start.role.index is not None or start.role.master is None:
        return _listening(start, None)
    role, held = _enrolled_server(start)
    try:
        return _listening(start._replace(role=role), held)
    except BaseException as error:
        held.close()
        report_failure(role, f"{type(error).__name__}: {error}", start.tls)
        raise


def _listening(start: Start, held: socket.socket | None) -> ServerJob:
    role, strategy, deadline_s, tls = start
    index = _index(role)
    server = _server(role, index, role.server_num, deadline_s)
    server.resuming.remains = remains_of(role, strategy)
    listener = Listener(
        _endpoints(role)[index],
        server,
        tls=None if tls is None else tls.as_server,
        token=role.token,
        limits=ConnectionLimits(silence_s=deadline_s),
        name=f"server {index}",
        held=held,
    )
    where = endpoint_text(listener.address)
    logger.info("server %d of %d listens at %s", index, role.server_num, where)
    if not (tls or role.token or is_loopback(listener.address[0])):
        logger.warning("%s", OPEN.format(where=where))
    process = ServerProcess(server, listener)
    group = Group(deadline_s=deadline_s)
    return ServerJob(role=role, group=group, strategy=strategy, tls=tls, process=process)


def _enrolled_server(start: Start) -> tuple[Role, socket.socket]:
    """The index comes from a scheduler, which is told the port; the socket is bound to it."""
    held = hold((own_address(start.role), 0))
    try:
        role, _ = enrol(start.role, VERSION, start.deadline_s, held.getsockname()[1], start.tls)
    except BaseException:
        held.close()
        raise
    return role, held


def _work(start: Start) -> ServedJob:
    role, strategy, deadline_s, tls = start
    redo = redo_of(role, strategy, _index(role), _incarnation())
    connector = _Connector(start, redo)
    client = Client(_index(role), role.worker_num, role.server_num, connector.connect, redo)
    connector.has_joined = lambda: client.has_joined
    if strategy.durability == "log":
        connector.acknowledged = lambda server: client.acknowledged[server]
    resume_with_all(client, role, strategy, waits=True)
    # one that cannot go on says so before the servers take it in
    replay = None if redo is None else WorkerReplay(redo, functools.partial(report_returning, role))
    crew = ServedGroup(client, deadline_s)
    session = ServerSession(client, None, replay)
    return ServedJob(role=role, group=crew, strategy=strategy, tls=tls, session=session)


def _alone(start: Start) -> ServedJob:
    """One process: its server is an object, reached by calls in place of a network."""
    role, strategy, deadline_s, tls = start
    server = _server(role, 0, 1, deadline_s)
    server.resuming.remains = remains_of(role, strategy)
    redo = redo_of(role, strategy, 0, _incarnation())
    incarnation = _incarnation() if redo is None else redo.identity.incarnation
    life = 1 if redo is None else redo.identity.life

    def connect(lane: str) -> Sequence[Channel]:
        channel = MemoryChannel(server)
        hello = _hello(role, 0, 1, lane, incarnation)
        channel.welcome = channel.call(msgspec.structs.replace(hello, life=life))
        return [channel]

    client = Client(0, 1, 1, connect, redo)
    resume_with_all(client, role, strategy, waits=False)
    replay = None if redo is None else WorkerReplay(redo, lambda returns: None)
    crew = ServedGroup(client, deadline_s)
    session = ServerSession(client, server, replay)
    return ServedJob(role=role, group=crew, strategy=strategy, tls=tls, session=session)


class _Connector:
    """Opens lanes to the servers of a job."""

    def __init__(self, start: Start, redo: WorkerJournal | None) -> None:
        role, strategy, deadline_s, tls = start
        self._role = role
        self._deadline_s = deadline_s
        self._endpoints = _endpoints(role)
        self._tls: ssl.SSLContext | None = None if tls is None else tls.as_client
        self._incarnation = _incarnation() if redo is None else redo.identity.incarnation
        self._life = 1 if redo is None else redo.identity.life
        #: how long the servers wait for it, should it die, and it for them
        configs = strategy.durability_configs
        self._away_s = 0.0
        if redo is not None and role.job and role.max_restarts != 0:
            self._away_s = configs.away_within(deadline_s)
        #: on all lanes
        self._fence = IncarnationFence()
        #: whether the servers know this worker's plan
        self.has_joined: Callable[[], bool] = lambda: False
        #: the last push that a server has acknowledged, and may not have lost
        self.acknowledged: Callable[[int], int] = lambda server: 0

    def connect(self, lane: str) -> Sequence[Channel]:
        """A channel to each server, all welcomed; waits for those that still have to start."""
        # the other servers hear nothing meanwhile, and must not take that for silence
        least_s = min(_AWAY_S, self._deadline_s / 2)
        channels = [
            SocketChannel(
                endpoint,
                f"server {server}",
                # the server names whoever it waits for, if it is given the time to say so
                deadline_s=self._deadline_s + _GRACE_S,
                patience=RetryPolicy(max(least_s, self._away_s)),
                tls=self._tls,
                token=self._role.token,
                greeting=lambda server=server: self._greeting(server, lane),  # type: ignore[misc]
                check=self._fence.check,
            )
            for server, endpoint in enumerate(self._endpoints)
        ]
        connect_all(channels, self._deadline_s, _tell_not_ready)
        return channels

    def _greeting(self, server: int, lane: str) -> m.Greeting:
        hello = _hello(self._role, server, len(self._endpoints), lane, self._incarnation)
        return msgspec.structs.replace(
            hello,
            joined=self.has_joined(),
            life=self._life,
            away_s=self._away_s,
            acknowledged=self.acknowledged(server),
        )


def _incarnation() -> int:
    """A later life of the same worker has a larger number."""
    return time.time_ns() // 1000


def _tell_not_ready(missing: list[str]) -> None:
    logger.info("not ready endpoints: %s", missing)


def _hello(role: Role, server: int, server_num: int, lane: str, incarnation: int) -> m.Greeting:
    return m.Greeting(
        fleetlight=VERSION,
        worker=_index(role),
        worker_num=role.worker_num,
        server=server,
        server_num=server_num,
        incarnation=incarnation,
        lane=lane if lane in (CONTROL, PUSH) else PULL,
    )


def _server(role: Role, index: int, server_num: int, deadline_s: float) -> Server:
    return Server(
        index,
        server_num,
        role.worker_num,
        version=VERSION,
        deadline_s=deadline_s,
    )


def _endpoints(role: Role) -> Sequence[tuple[str, int]]:
    if not role.server_endpoints:
        raise RoleError(
            f"{role.dialect}: the job has {role.server_num} parameter servers, but nothing says "
            "where they listen; give their host:port (FLEET_SERVER_ENDPOINTS, or "
            "PADDLE_PSERVERS_IP_PORT_LIST)"
        )
    return role.server_endpoints


def _index(role: Role) -> int:
    if role.index is None:
        raise PlanError(f"{role.dialect}: nothing says which {role.kind.value} this process is")
    return role.index


# -- memory of a server
#
# glibc gives every thread a heap of its own, and after one large array it keeps as much on each
# heap for the next. A server has a thread for each connection, and rarely two with large arrays.

#: numbers of glibc's malloc.h
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8
#: Arrays from here on come from the system and go back to it; NumPy asks for huge pages from here
#: on, so that fresh memory is cheap.
LARGE_BYTES = 4 << 20


def give_back_freed() -> None:
    """One heap for all threads, and large arrays outside of it; nothing where malloc is another."""
    # no library to look into, or no such function in it
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_ARENA_MAX, 1)
        mallopt(_MMAP_THRESHOLD, LARGE_BYTES)
        mallopt(_TRIM_THRESHOLD, 2 * LARGE_BYTES)
