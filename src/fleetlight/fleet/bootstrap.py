# SPDX-License-Identifier: Apache-2.0
"""Joins a job with parameter servers: as a server, as a worker, or as both in one process."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import socket
import ssl
from collections.abc import Callable, Sequence

import msgspec

from fleetlight.collective.forming import given_device, own_address
from fleetlight.collective.group import Group
from fleetlight.errors import PlanError, RoleError
from fleetlight.fleet.exit.exit_status import report_restartable
from fleetlight.fleet.free_place import facts_of_running_job
from fleetlight.fleet.job import Job
from fleetlight.fleet.plan.durability_dir import remains_of, worker_journal_of
from fleetlight.fleet.rendezvous import (
    endpoints_of,
    held_socket,
    keeps_rendezvous,
    placed,
    rendezvous_of,
    size_of,
    with_own_index,
)
from fleetlight.fleet.served.durable.replayed_job import replay_of, served_job
from fleetlight.fleet.served.durable.whole_resume import resume_with_all
from fleetlight.fleet.served.job import ServedJob
from fleetlight.fleet.served.joining_job import JobEnded, JoiningJob
from fleetlight.fleet.served.session import ServerSession
from fleetlight.fleet.server.job import ServerJob, ServerProcess
from fleetlight.observe.log import logger
from fleetlight.ps import messages as m
from fleetlight.ps.placement import buckets_of
from fleetlight.ps.rendezvous.addresses import Addresses, AnnouncedAddresses, FixedAddresses
from fleetlight.ps.rendezvous.client import Announcer, RendezvousClient
from fleetlight.ps.rendezvous.service import RendezvousService, WithRendezvous
from fleetlight.ps.server.server import Server
from fleetlight.ps.transport.channel import SocketChannel, connect_all
from fleetlight.ps.transport.interface import Channel, MemoryChannel, RetryPolicy
from fleetlight.ps.transport.listener import Listener
from fleetlight.ps.transport.session import ConnectionLimits
from fleetlight.ps.worker.client import Client
from fleetlight.ps.worker.connections import CONTROL, PULL, PUSH, IncarnationFence
from fleetlight.ps.worker.joining import RunningJob
from fleetlight.ps.worker.replay.step_journal import NoJournal, StepJournal, start_stamp
from fleetlight.ps.worker.served_group import ServedGroup
from fleetlight.roles import Endpoint, Role, endpoint_text
from fleetlight.roles.address import is_loopback
from fleetlight.security.context import Contexts
from fleetlight.security.token import OPEN
from fleetlight.strategy import DistributedStrategy
from fleetlight.version import VERSION
from fleetlight.wire.descriptors import allow_descriptors

#: how much longer a worker waits for a reply than the server may wait for other workers
_GRACE_S = 5.0

#: how long a worker waits for a server that was lost and has no durable state
_AWAY_S = 5.0
#: connections of a worker to a server, one of which may be reconnecting; other open files
_CONNECTIONS, _OTHER_DESCRIPTORS = 6, 64


def join_servers(
    role: Role, strategy: DistributedStrategy, deadline_s: float, tls: Contexts | None
) -> Job:
    """The job of this process, which has parameter servers or one process alone."""
    if role.join is not None:
        return _join_running(role, strategy, deadline_s, tls)
    role = with_own_index(role)
    if role.is_elastic and not role.server_num:
        raise RoleError(
            f"fleet.init(): the job may have up to {role.places} workers, but it has no parameter "
            f"servers ({role.dialect}), and only with them workers join and leave while the job "
            "runs; start it with --server_num, or with a fixed --worker_num"
        )
    if role.is_server:
        return _join_as_server(role, strategy, deadline_s, tls)
    if role.worker_num > 1 and not role.server_num:
        raise RoleError(
            f"fleet.init(): the job has {role.worker_num} workers and no parameter servers "
            f"({role.dialect}); start it with servers (fleetrun --server_num 2 --worker_num "
            f"{role.worker_num}), or call fleet.init(is_collective=True)"
        )
    return _join_as_worker(role, strategy, deadline_s, tls)


def _join_as_worker(
    role: Role, strategy: DistributedStrategy, deadline_s: float, tls: Contexts | None
) -> ServedJob:
    join = _served_worker if role.server_num else _single_process
    return join(role, strategy, deadline_s, tls)


def _join_as_server(
    role: Role, strategy: DistributedStrategy, deadline_s: float, tls: Contexts | None
) -> ServerJob:
    """Listen from now on: workers can connect before the server has a plan."""
    limit_malloc_arenas()
    point = _own_rendezvous(role, deadline_s)
    if role.server_endpoints:
        return _listen(role, strategy, deadline_s, tls, point)
    held = held_socket(role)
    rendezvous = rendezvous_of(role, deadline_s, tls, point)
    try:
        if role.index is None:
            role = placed(role, rendezvous.enrol())
        job = _listen(role, strategy, deadline_s, tls, point, held)
        _announce(job, rendezvous, deadline_s)
    except BaseException as error:
        held.close()
        rendezvous.depart(role.index or 0, f"{type(error).__name__}: {error}")
        raise
    return job


def _own_rendezvous(role: Role, deadline_s: float) -> RendezvousService | None:
    """The rendezvous that this server keeps, if any."""
    if not keeps_rendezvous(role):
        return None
    return RendezvousService(size_of(role), deadline_s=deadline_s)


def _announce(job: ServerJob, rendezvous: RendezvousClient, deadline_s: float) -> None:
    """Say where the server listens, and learn where the others do."""
    role, process = job.role, job.process
    endpoint = own_address(role), process.listener.address[1]
    process.announcer = Announcer(
        rendezvous,
        _index(role),
        endpoint,
        lambda error: process.fail(str(error)),
        buckets_of(_index(role), role.server_num),
    )
    process.announcer.start(deadline_s)
    job.role = role.replace(server_endpoints=endpoints_of(rendezvous.locate()))
    process.server.joins.server_endpoints = job.role.server_endpoints
    process.server.joins.announces = True


def _limits(worker_num: int, deadline_s: float) -> ConnectionLimits:
    """Limits with room for the connections of all workers."""
    usual = ConnectionLimits(silence_s=deadline_s)
    connections = max(usual.connections, _CONNECTIONS * worker_num)
    wanted = connections + _OTHER_DESCRIPTORS
    allowed = allow_descriptors(wanted)
    if allowed < _CONNECTIONS * worker_num + _OTHER_DESCRIPTORS:
        logger.warning(
            "this server needs about %d open files for %d workers, but the limit is %d; raise the "
            "hard limit (ulimit -Hn), or use fewer workers",
            _CONNECTIONS * worker_num + _OTHER_DESCRIPTORS,
            worker_num,
            allowed,
        )
    return dataclasses.replace(usual, connections=connections)


def _listen(
    role: Role,
    strategy: DistributedStrategy,
    deadline_s: float,
    tls: Contexts | None,
    point: RendezvousService | None,
    held: socket.socket | None = None,
) -> ServerJob:
    index = _index(role)
    server = _server(role, index, role.server_num, deadline_s)
    server.resuming.remains = remains_of(role, strategy)
    server.joins.job, server.joins.server_endpoints = role.job, role.server_endpoints
    server.joins.checkpoint = strategy.checkpoint or ""
    listener = Listener(
        _master_of(role) if held is not None else role.server_endpoints[index],
        server if point is None else WithRendezvous(server, point),
        tls=None if tls is None else tls.as_server,
        token=role.token,
        limits=_limits(role.places, deadline_s),
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


def _served_worker(
    role: Role, strategy: DistributedStrategy, deadline_s: float, tls: Contexts | None
) -> ServedJob:
    rendezvous = rendezvous_of(role, deadline_s, tls)
    if role.index is None:
        role = placed(role, rendezvous.enrol())
    role, addresses = _located(role, rendezvous)
    journal = worker_journal_of(role, strategy, _index(role), start_stamp())
    connector = _Connector(role, strategy, deadline_s, tls, journal, addresses)
    client = _client_of(role, strategy, connector, journal)
    resume_with_all(client, role, strategy, waits=True)
    role = _with_place(role, client, rendezvous)
    # a worker that cannot resume reports that before the servers admit it
    replay = replay_of(journal, functools.partial(report_restartable, role))
    group = ServedGroup(client, deadline_s, given_device(role))
    session = ServerSession(client, None)
    if not isinstance(addresses, FixedAddresses) and not (role.is_elastic and role.index):
        # an elastic job continues without a worker that fails
        session.rendezvous = rendezvous
    job = served_job(replay, role=role, group=group, strategy=strategy, tls=tls, session=session)
    # the script may give its strategy after fleet.init
    connector.shares_memory = lambda: job.strategy.shared_memory
    return job


def _client_of(
    role: Role, strategy: DistributedStrategy, connector: _Connector, journal: StepJournal
) -> Client:
    """The client of a worker, whose greetings say what it has done."""
    client = Client(
        _index(role),
        role.worker_num,
        role.server_num,
        connector.connect,
        journal,
        worker_max=role.worker_max,
    )
    connector.has_joined = lambda: client.has_joined
    if strategy.durability == "log":
        connector.acknowledged = lambda server: client.acknowledged[server]
    return client


def _join_running(
    role: Role, strategy: DistributedStrategy, deadline_s: float, tls: Contexts | None
) -> ServedJob:
    """A worker that joins while the job runs; if it dies, the others continue without it."""
    started_at = start_stamp()
    facts = facts_of_running_job(role, deadline_s, tls, started_at)
    role = facts.role
    if facts.checkpoint and not strategy.checkpoint:
        # all workers stop and save together
        strategy.checkpoint = facts.checkpoint
    logger.warning(
        "joining a job of %d to %d workers as worker %d", role.worker_num, role.places, role.index
    )
    addresses: Addresses = FixedAddresses(role.server_endpoints)
    if facts.announces:
        role, addresses = _located(role, rendezvous_of(role, deadline_s, tls))
    journal = NoJournal(started_at)
    connector = _Connector(role, strategy, deadline_s, tls, journal, addresses)
    client = _client_of(role, strategy, connector, journal)
    group = ServedGroup(client, deadline_s, given_device(role))
    group.prelude = RunningJob(client).known_barriers()
    if group.prelude is None:
        logger.warning(
            "the job has ended before this worker could join (workers join in a loop over a loader "
            "of fleet.shard(loader, deal='queue'))"
        )
        group.leave()
        raise JobEnded
    session = ServerSession(client, None)
    job = JoiningJob(role=role, group=group, strategy=strategy, tls=tls, session=session)
    connector.shares_memory = lambda: job.strategy.shared_memory
    return job


def _located(role: Role, rendezvous: RendezvousClient) -> tuple[Role, Addresses]:
    """The role with the endpoints of the servers, and where they listen from now on."""
    if role.server_endpoints:
        return role, FixedAddresses(role.server_endpoints)
    stored_by = functools.partial(buckets_of, server_num=role.server_num)
    addresses = AnnouncedAddresses(rendezvous, stored_by, role.worker_num)
    return role.replace(server_endpoints=addresses.wait_for_all()), addresses


def _with_place(role: Role, client: Client, rendezvous: RendezvousClient) -> Role:
    """The role with the place of this worker, which a restarted one keeps."""
    if role.local_rank is not None and role.node_num is not None:
        return role
    encoded = client.replies.once("place", lambda: [msgspec.json.encode(rendezvous.enrol())])
    return placed(role, msgspec.json.decode(encoded[0], type=m.Enrolled))


def _single_process(
    role: Role, strategy: DistributedStrategy, deadline_s: float, tls: Contexts | None
) -> ServedJob:
    """One process, whose server is an object that the worker calls without a network."""
    server = _server(role, 0, 1, deadline_s)
    server.resuming.remains = remains_of(role, strategy)
    journal = worker_journal_of(role, strategy, 0, start_stamp())

    def connect(lane: str) -> Sequence[Channel]:
        channel = MemoryChannel(server)
        greeting = _greeting(role, 0, 1, lane, journal.started_at)
        channel.welcome = channel.call(
            msgspec.structs.replace(greeting, incarnation=journal.incarnation)
        )
        return [channel]

    client = Client(0, 1, 1, connect, journal)
    resume_with_all(client, role, strategy, waits=False)
    replay = replay_of(journal, lambda restartable: None)
    group = ServedGroup(client, deadline_s, given_device(role))
    session = ServerSession(client, server)
    return served_job(replay, role=role, group=group, strategy=strategy, tls=tls, session=session)


class _Connector:
    """Connects a worker to the servers of its job."""

    def __init__(
        self,
        role: Role,
        strategy: DistributedStrategy,
        deadline_s: float,
        tls: Contexts | None,
        journal: StepJournal,
        addresses: Addresses,
    ) -> None:
        self._role = role
        self._deadline_s = deadline_s
        self._addresses = addresses
        self._tls: ssl.SSLContext | None = None if tls is None else tls.as_client
        self._started_at, self._incarnation = journal.started_at, journal.incarnation
        #: how long servers wait for this worker if it dies, and this worker for a server
        self._away_s = 0.0
        if journal.is_stored and role.job and role.max_restarts != 0:
            self._away_s = strategy.durability_configs.away_within(deadline_s)
        #: for all lanes
        self._fence = IncarnationFence()
        #: True if large messages may go through shared memory
        self.shares_memory: Callable[[], bool] = lambda: strategy.shared_memory
        #: servers whose shared memory, or lack of it, was reported
        self._reported: set[int] = set()
        #: True once the servers have this worker's plan
        self.has_joined: Callable[[], bool] = lambda: False
        #: the last push that a server has acknowledged and must still have
        self.acknowledged: Callable[[int], int] = lambda server: 0

    def connect(self, lane: str) -> Sequence[Channel]:
        """Open a channel to each server; waits for servers that have not started yet."""
        # one slow server must not make the others look silent
        least_s = min(_AWAY_S, self._deadline_s / 2)
        channels = [
            SocketChannel(
                functools.partial(self._addresses.of, server),
                f"server {server}",
                # the server needs time to name the worker that it waits for
                deadline_s=self._deadline_s + _GRACE_S,
                retry=RetryPolicy(max(least_s, self._away_s)),
                tls=self._tls,
                token=self._role.token,
                greeting=lambda server=server: self._greeting(server, lane),  # type: ignore[misc]
                check=self._fence.check,
                on_sharing=self._on_sharing(server),
            )
            for server in range(self._role.server_num)
        ]
        connect_all(channels, self._deadline_s, _report_not_ready)
        return channels

    def _on_sharing(self, server: int) -> Callable[[str], None] | None:
        """Report whether a server shares memory, once for all lanes."""

        def report(why: str) -> None:
            if server in self._reported:
                return
            self._reported.add(server)
            if why:
                logger.info("server %d is on this host but shares no memory: %s", server, why)
            else:
                logger.debug("rows and gradients of server %d go through shared memory", server)

        return report if self.shares_memory() else None

    def _greeting(self, server: int, lane: str) -> m.Greeting:
        greeting = _greeting(self._role, server, self._role.server_num, lane, self._started_at)
        return msgspec.structs.replace(
            greeting,
            joined=self.has_joined(),
            incarnation=self._incarnation,
            away_s=self._away_s,
            acknowledged=self.acknowledged(server),
            joins=self._role.join is not None,
        )


def _report_not_ready(missing: list[str]) -> None:
    logger.info("not ready endpoints: %s", missing)


def _greeting(role: Role, server: int, server_num: int, lane: str, started_at: int) -> m.Greeting:
    return m.Greeting(
        fleetlight=VERSION,
        worker=_index(role),
        worker_num=role.worker_num,
        server=server,
        server_num=server_num,
        started_at=started_at,
        lane=lane if lane in (CONTROL, PUSH) else PULL,
        worker_max=role.worker_max,
    )


def _server(role: Role, index: int, server_num: int, deadline_s: float) -> Server:
    return Server(
        index,
        server_num,
        role.worker_num,
        version=VERSION,
        deadline_s=deadline_s,
        worker_max=role.worker_max,
    )


def _master_of(role: Role) -> Endpoint:
    assert role.master is not None
    return role.master


def _index(role: Role) -> int:
    if role.index is None:
        raise PlanError(f"{role.dialect}: no variable has the index of this {role.kind.value}")
    return role.index


# -- memory of a server
#
# glibc gives every thread its own arena, and each arena keeps the memory of its largest array. A
# server has a thread for each connection, and rarely two of them with large arrays at a time.

#: numbers of glibc's malloc.h
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8
#: Arrays of this size come from mmap and return to the system when freed. NumPy asks for huge pages
#: from this size on, so fresh memory is cheap.
LARGE_BYTES = 4 << 20


def limit_malloc_arenas() -> None:
    """Use one arena for all threads, and mmap for large arrays; does nothing without glibc."""
    # another C library has no such function
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_ARENA_MAX, 1)
        mallopt(_MMAP_THRESHOLD, LARGE_BYTES)
        mallopt(_TRIM_THRESHOLD, 2 * LARGE_BYTES)
