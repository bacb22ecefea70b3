# SPDX-License-Identifier: Apache-2.0
"""How a process joins a job with parameter servers."""

from __future__ import annotations

import logging
import socket
import threading
from pathlib import Path
from typing import Any

import pytest
from tests.ps.rendezvous.members import listening
from tests.workers import reserved_port

from fleetlight.errors import DeadlineError, PeerError, RoleError
from fleetlight.fleet import bootstrap
from fleetlight.fleet import job as jobs
from fleetlight.fleet.bootstrap import _Connector, join_servers
from fleetlight.fleet.rendezvous import size_of
from fleetlight.fleet.served.job import ServedJob
from fleetlight.fleet.server.job import ServerJob, ServerProcess
from fleetlight.ps import messages as m
from fleetlight.ps.rendezvous.addresses import FixedAddresses
from fleetlight.ps.rendezvous.service import RendezvousService
from fleetlight.ps.transport.listener import bind
from fleetlight.ps.worker.connections import CONTROL, PREFETCH, PULL, PUSH
from fleetlight.ps.worker.replay.step_journal import NoJournal, StepJournal
from fleetlight.ps.worker.replay.worker_journal import WorkerIdentity, WorkerJournal
from fleetlight.ps.worker.served_group import ServedGroup
from fleetlight.roles import Kind, Role
from fleetlight.roles.secret import Secret
from fleetlight.strategy import DistributedStrategy


def joined(role: Role, deadline_s: float = 20.0) -> jobs.Job:
    return join_servers(role, DistributedStrategy(), deadline_s, None)


def served_by(role: Role) -> ServerProcess:
    job = joined(role)
    assert isinstance(job, ServerJob)
    return job.process


def test_single_process_has_an_embedded_server() -> None:
    context = joined(Role())
    assert isinstance(context, ServedJob)
    assert context.session.embedded is not None
    assert context.group.alone
    context.group.leave()
    context.session.embedded.wait()


def test_error_for_workers_without_servers_names_the_remedy() -> None:
    with pytest.raises(RoleError, match=r"2 workers and no parameter servers .*is_collective=True"):
        joined(Role(worker_num=2))


@pytest.mark.parametrize("kind", [Kind.WORKER, Kind.SERVER])
def test_servers_need_an_address_or_a_service_of(kind: Kind) -> None:
    with pytest.raises(RoleError, match="no variable says where they listen, or where the job me"):
        joined(Role(kind=kind, worker_num=1, server_num=1))


def test_greeting_says_how_long_a_worker_may_be_away(tmp_path: Path) -> None:
    strategy = DistributedStrategy(durability="log")
    role = Role(index=0, server_num=1, server_endpoints=[("127.0.0.1", 1)], job="a job")
    at = FixedAddresses(role.server_endpoints)
    journal = WorkerJournal(tmp_path, WorkerIdentity(0, 1, 1, "a job", 0, 7), 60.0)
    none = NoJournal()

    def away_s(role: Role, journal: StepJournal) -> float:
        return _Connector(role, strategy, 60.0, None, journal, at)._greeting(0, CONTROL).away_s

    # less than the deadline of the others
    assert (away_s(role, journal), away_s(role, none)) == (40.0, 0.0)
    # it restarts only with all others, in a launch that resumes
    for alone in (role.replace(job=""), role.replace(max_restarts=0)):
        assert away_s(alone, journal) == 0.0


class Job:
    """A server that listens, and the roles of its workers."""

    def __init__(self, workers: int = 1) -> None:
        holder, port = reserved_port()
        with holder:
            self.roles = [self._role(Kind.WORKER, n, workers, port) for n in range(workers)]
            self.process = served_by(self._role(Kind.SERVER, 0, workers, port))

    def _role(self, kind: Kind, index: int, workers: int, port: int) -> Role:
        return Role(
            kind=kind,
            index=index,
            worker_num=workers,
            server_num=1,
            server_endpoints=(("127.0.0.1", port),),
            local_rank=index,
            node_num=1,
        )

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: Any) -> None:
        self.process.stop()


def test_workers_gather_before_the_server_has_a_plan() -> None:
    with Job(2) as job:
        groups = [joined(role).group for role in job.roles]
        found: list[Any] = []
        other = threading.Thread(target=lambda: found.append(groups[1].gather_bytes(b"b", "names")))
        other.start()
        assert groups[0].gather_bytes(b"a", "names") == [b"a", b"b"]
        other.join()
        assert found == [[b"a", b"b"]]
        for group in groups:
            group.leave()
        job.process.server.wait()


def test_server_accepts_every_lane() -> None:
    with Job() as job:
        group = joined(job.roles[0]).group
        assert isinstance(group, ServedGroup)
        for lane in (CONTROL, PUSH, PULL, PREFETCH):
            [channel] = group.client.open_lane(lane)
            assert channel.peer.startswith("server 0")
        group.leave()


@pytest.mark.slow
def test_lane_to_an_earlier_incarnation_of_a_server_is_refused() -> None:
    with Job() as job:
        server = job.process.server
        server._incarnation = 3
        group = joined(job.roles[0], deadline_s=0.5).group
        assert isinstance(group, ServedGroup)
        server._incarnation = 2
        with pytest.raises(DeadlineError, match="replies as incarnation 2, but incarnation 3 has"):
            group.client.open_lane(PUSH)
        server._incarnation = 3
        group.client.open_lane(PUSH)
        group.leave()


def test_failed_server_reports_its_error() -> None:
    with Job() as job:
        group = joined(job.roles[0]).group
        assert isinstance(group, ServedGroup)
        job.process.fail("KeyError: 'x'")
        with pytest.raises(PeerError, match="server 0 has closed: KeyError: 'x'"):
            group.client.everywhere(m.EndPhase(0))
        group.fail("")


def test_server_that_never_starts_is_named() -> None:
    holder, port = reserved_port()
    with holder:
        role = Role(server_num=1, server_endpoints=(("127.0.0.1", port),), local_rank=0, node_num=1)
        with pytest.raises(DeadlineError, match=rf"server 0 .*127\.0\.0\.1:{port}"):
            joined(role, deadline_s=0.3)


def test_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with Job() as job:
        monkeypatch.setattr(bootstrap, "VERSION", "0.0")
        with pytest.raises(PeerError, match=r"0\.0"):
            joined(job.roles[0])


def test_server_that_cannot_listen_fails_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[socket.socket] = []
    monkeypatch.setattr(
        "fleetlight.fleet.rendezvous.bind", lambda endpoint: held.append(bind(endpoint)) or held[0]
    )
    facts: Any = {"worker_num": 1, "server_num": 1, "master_keeper": "it"}
    point = RendezvousService(size_of(Role(**facts)), deadline_s=20.0)
    with listening(point) as listener:
        facts["master"] = listener.address
        worker, server = (
            Role(kind=kind, index=None, **facts) for kind in (Kind.WORKER, Kind.SERVER)
        )

        def fail(*args: object, **kwargs: object) -> None:
            raise OSError("no more descriptors")

        monkeypatch.setattr("fleetlight.fleet.bootstrap.Listener", fail)
        with pytest.raises(OSError, match="no more descriptors"):
            join_servers(server, DistributedStrategy(), 20.0, None)
        with pytest.raises(PeerError, match="server 0 failed: OSError: no more descriptors"):
            join_servers(worker, DistributedStrategy(), 20.0, None)
    assert held[0].fileno() == -1


def test_port_is_released() -> None:
    with Job() as job:
        [endpoint] = job.roles[0].server_endpoints
    with socket.socket() as again:
        again.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        again.bind(endpoint)


@pytest.mark.parametrize(
    ("host", "token", "warned"),
    [("0.0.0.0", None, 1), ("0.0.0.0", Secret("3f9ac27e51d0b846"), 0), ("127.0.0.1", None, 0)],
    ids=["open", "token", "this machine"],
)
def test_server_open_to_other_machines_warns(
    host: str, token: Secret | None, warned: int, caplog: pytest.LogCaptureFixture
) -> None:
    """A server listens on all interfaces only if configured to."""
    holder, port = reserved_port()
    holder.close()
    role = Role(
        kind=Kind.SERVER, worker_num=1, server_num=1, server_endpoints=((host, port),), token=token
    )
    with caplog.at_level(logging.WARNING, "fleetlight"):
        service = served_by(role)
    assert service is not None
    assert service.listener.address == (host, port)
    service.stop()
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == warned
    for line in lines:
        assert line.startswith(f"anyone who reaches 0.0.0.0:{port} can read and change")


def test_a_server_accepts_the_connections_of_all_workers(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    wanted: list[int] = []
    monkeypatch.setattr(bootstrap, "allow_descriptors", lambda n: wanted.append(n) or n)
    assert bootstrap._limits(2, 5.0).connections == 1024
    assert bootstrap._limits(1000, 5.0).connections == 6000 < wanted[-1]
    assert not caplog.text
    monkeypatch.setattr(bootstrap, "allow_descriptors", lambda n: 1024)
    bootstrap._limits(100, 5.0)
    assert not caplog.text
    bootstrap._limits(1000, 5.0)
    assert "6064 open files for 1000 workers, but the limit is 1024" in caplog.text
