# SPDX-License-Identifier: Apache-2.0
"""How processes join and leave a job: modes, arguments, ranks, and the end."""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from tests.errors import error_text
from tests.ps.rendezvous.members import listening
from tests.ps.serving import closed_server, open_up, plan, team
from tests.workers import reserved_port, run_processes, run_workers

import fleetlight as fleet
from fleetlight.collective.group import Group
from fleetlight.errors import (
    CheckpointError,
    ConfigError,
    DeadlineError,
    PeerError,
    PeerLostError,
    RoleError,
    StrategyError,
)
from fleetlight.fleet import bootstrap
from fleetlight.fleet import job as jobs
from fleetlight.fleet.bootstrap import _Connector, join_servers
from fleetlight.fleet.exit import exit_status
from fleetlight.fleet.job import current, current_or_none, set_current
from fleetlight.fleet.lifecycle import _deadline
from fleetlight.fleet.rendezvous import size_of
from fleetlight.fleet.served.job import ServedJob
from fleetlight.fleet.server.job import ServerJob, ServerProcess
from fleetlight.launch.job.layout import JobProcess
from fleetlight.launch.processes.failure import ProcessExit
from fleetlight.launch.status import UNKNOWN, read
from fleetlight.observe.log import logger
from fleetlight.ps import messages as m
from fleetlight.ps.journal.folder import Folder
from fleetlight.ps.rendezvous.addresses import FixedAddresses
from fleetlight.ps.rendezvous.service import RendezvousService
from fleetlight.ps.server.durability.durability import Durable
from fleetlight.ps.transport.listener import Listener, bind
from fleetlight.ps.worker.connections import CONTROL, PREFETCH, PULL, PUSH
from fleetlight.ps.worker.replay.step_journal import NoJournal, StepJournal
from fleetlight.ps.worker.replay.worker_journal import WorkerIdentity, WorkerJournal
from fleetlight.ps.worker.served_group import ServedGroup
from fleetlight.roles import Kind, Role
from fleetlight.roles.secret import Secret
from fleetlight.strategy import DistributedStrategy


def test_calls_before_init_name_the_remedy() -> None:
    assert current_or_none() is None
    for call in (fleet.worker_index, fleet.barrier_worker, fleet.is_first_worker):
        with pytest.raises(ConfigError, match=r"call fleet\.init"):
            call()
    fleet.stop_worker()


def test_workers_without_servers_need_is_collective(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLEET_ROLE", "worker")
    monkeypatch.setenv("FLEET_INDEX", "0")
    monkeypatch.setenv("FLEET_WORKER_NUM", "2")
    monkeypatch.setenv("FLEET_MASTER", "127.0.0.1:4711")
    with pytest.raises(RoleError, match=r"fleet\.init\(is_collective=True\)"):
        fleet.init()


def test_collective_with_servers_is_refused() -> None:
    maker = fleet.UserDefinedRoleMaker(
        worker_endpoints=["127.0.0.1:1"], server_endpoints=["127.0.0.1:2"]
    )
    with pytest.raises(RoleError, match="the job has 1 parameter servers"):
        fleet.init(maker, is_collective=True)


def test_away_time_above_the_deadline_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLEET_DEADLINE_S", "60")
    strategy = fleet.DistributedStrategy(durability="log", durability_configs={"away_s": 90})
    with pytest.raises(StrategyError, match="away_s = 90, expected less than deadline_s = 60"):
        fleet.init(strategy=strategy)
    assert current_or_none() is None


def warned_at_init() -> list[str]:
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    fleet.init(is_collective=True)
    fleet.stop_worker()
    logger.removeHandler(handler)
    return [text for text in records if "does not read it" in text]


def in_foreign_environment(env: dict[str, str]) -> list[str]:
    os.environ.update(env)
    return warned_at_init()


def test_variables_of_other_systems_warn_once_per_job() -> None:
    env = {"CPU_NUM": "4", "FLAGS_communicator_send_queue_size": "8", "MS_NODE_TIMEOUT": ""}
    first, second = run_processes(in_foreign_environment, [(env,), (env,)])
    cpu, queue = first
    assert cpu.startswith("CPU_NUM is set, but Fleetlight does not read it: ")
    assert queue.endswith("use strategy.a_sync_configs.send_queue_size")
    assert second == []


@pytest.mark.parametrize(
    ("is_collective", "settings"), [(False, {}), (True, {}), (True, {"durability": "log"})]
)
def test_resume_without_saved_state_is_refused(
    is_collective: bool, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLEET_RESUME", "1")
    strategy = fleet.DistributedStrategy(**settings)
    with pytest.raises(ConfigError, match="saves nothing to resume from: start it with"):
        fleet.init(is_collective=is_collective, strategy=strategy)
    assert current_or_none() is None


def test_resume_begins_without_saved_state_if_it_may(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLEET_RESUME", "auto")
    fleet.init()
    assert current_or_none() is not None
    fleet.reset()


def identity() -> Any:
    fleet.init(is_collective=True)
    facts = (
        fleet.worker_index(),
        fleet.worker_num(),
        fleet.local_rank(),
        fleet.node_num(),
        fleet.is_worker(),
        fleet.is_server(),
        fleet.is_first_worker(),
        fleet.server_num(),
        fleet.server_endpoints(),
        len(fleet.worker_endpoints()),
    )
    fleet.stop_worker()
    fleet.stop_worker()
    return facts


@pytest.mark.multiprocess
def test_ranks_and_roles() -> None:
    zero, one = run_workers(identity)
    assert zero == (0, 2, 0, 1, True, False, True, 0, [], 2)
    assert one == (1, 2, 1, 1, True, False, False, 0, [], 2)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((True,), r"is a bool, expected a RoleMaker; write fleet\.init\(is_collective=True"),
        ((fleet.DistributedStrategy(),), r"role_maker is a .*; write fleet\.init\(strategy="),
        ((None, True, {"amp": True}), "strategy is a dict, expected a DistributedStrategy"),
        ((None, fleet.DistributedStrategy()), r"is_collective .*; write fleet\.init\(strategy="),
        ((None, True, fleet.RoleMaker(env={})), r"strategy .*; write fleet\.init\(role_maker="),
    ],
)
def test_swapped_arguments_are_refused(arguments: tuple[Any, ...], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        fleet.init(*arguments)


def init_again() -> str:
    fleet.stop_worker()
    return error_text(ConfigError, fleet.init, is_collective=True)


@pytest.mark.multiprocess
def test_process_that_left_cannot_join_again() -> None:
    for text in run_workers(init_again):
        assert "this process has left its job" in text


def stop_after_a_failed_save(path: str) -> list[str]:
    """A background save fails; the session still ends and the worker leaves the job."""
    fleet.init()
    model = fleet.distributed_model(torch.nn.Linear(2, 1))
    fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    fleet.init_worker()
    session = current().session
    assert session is not None
    ended, stop = [], session.stop
    session.stop = lambda: (stop(), ended.append("stopped"))  # type: ignore[assignment, func-returns-value]
    fleet.save_persistables(path, background=True)
    with pytest.raises(CheckpointError, match="failed in the background"):
        fleet.stop_worker()
    return [*ended, str(current_or_none())]


@pytest.mark.multiprocess
def test_worker_leaves_after_a_failed_save(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    path = str(tmp_path / "file")
    assert run_processes(stop_after_a_failed_save, [(path,)]) == [["stopped", "None"]]


def stop_with_a_failing_last_push() -> list[str]:
    """The raised error is the cause; the worker sends no goodbye over closed lanes."""
    fleet.init()
    model = fleet.distributed_model(torch.nn.Linear(2, 1))
    fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    fleet.init_worker()
    session = current().session
    assert session is not None

    def stop() -> None:
        raise ValueError("the real cause")

    session.stop = stop  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="the real cause") as caught:
        fleet.stop_worker()
    return [str(caught.value.__context__), str(current_or_none())]


@pytest.mark.multiprocess
def test_error_of_the_last_push_is_raised() -> None:
    assert run_processes(stop_with_a_failing_last_push, [()]) == [["None", "None"]]


def deadline() -> str:
    return fleet.DistributedStrategy().explain()


@pytest.mark.multiprocess
def test_explain_names_the_deadline_of_the_environment() -> None:
    for text in run_workers(deadline, deadline_s=17.0):
        assert "17 s are in force, from FLEET_DEADLINE_S" in text


def test_deadline_names_the_variable_of_a_dialect() -> None:
    role = Role(dialect="any", deadline_s=9.0, deadline_variable="ANY_TIMEOUT")
    assert _deadline(role, fleet.DistributedStrategy()) == (9.0, "ANY_TIMEOUT")
    assert _deadline(role, fleet.DistributedStrategy(deadline_s=3)) == (3.0, "the strategy")
    assert _deadline(role.replace(deadline_s=None), fleet.DistributedStrategy())[1] == "the default"


# The end of servers and workers: the status that tells the launcher not to restart them.

S0 = JobProcess(kind=Kind.SERVER, index=0, of=1, local_rank=0, local_size=1)


def killed(error_file: str) -> ProcessExit:
    """The launcher's view of the server when it is killed now."""
    return ProcessExit.of(S0, -signal.SIGKILL, read(error_file), seen_at=0.0)


def serving(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[ServerJob, str]:
    """A durable server in a process that its launcher may restart."""
    monkeypatch.setattr(exit_status, "_last_status", UNKNOWN)
    error_file = str(tmp_path / "error")
    role = Role(kind=Kind.SERVER, server_num=1, worker_num=2, error_file=error_file)
    server = closed_server()
    open_up(server, plan("async"), Durable(tmp_path / "kept", job="a job"))
    exit_status.report_restartable(role)
    service = ServerProcess(server, Listener(("127.0.0.1", 0), server))
    context = ServerJob(
        role=role, group=Group(deadline_s=20.0), strategy=DistributedStrategy(), process=service
    )
    set_current(context)
    return context, error_file


def test_server_reports_done_before_it_removes_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    context, error_file = serving(tmp_path, monkeypatch)
    for worker in team(context.process.server):
        assert killed(error_file).may_restart_alone
        worker.leave()
    exits: list[ProcessExit] = []
    real = Folder.clear

    def clear(folder: Folder) -> None:
        exits.append(killed(error_file))
        real(folder)

    with mock.patch.object(Folder, "clear", clear):
        fleet.run_server()
    assert current_or_none() is None
    [exit_] = exits
    assert exit_.is_done
    assert not exit_.has_failed
    assert not exit_.may_restart_alone


def test_server_is_not_done_after_a_worker_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    context, error_file = serving(tmp_path, monkeypatch)
    for worker, error in zip(team(context.process.server), ("", "ValueError"), strict=True):
        worker.say(m.Leave(error))
    try:
        with pytest.raises(PeerLostError, match="worker 1 failed: ValueError"):
            fleet.run_server()
    finally:
        set_current(None)
    assert killed(error_file).has_failed
    assert killed(error_file).may_restart_alone


def test_worker_reports_that_it_leaves_before_it_leaves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exit_status, "_last_status", UNKNOWN)
    error_file = str(tmp_path / "error")
    set_current(join_servers(Role(error_file=error_file), DistributedStrategy(), 20.0, None))
    exits: list[ProcessExit] = []
    real = ServedGroup.leave

    def leave(group: ServedGroup) -> None:
        exits.append(killed(error_file))
        real(group)

    with mock.patch.object(ServedGroup, "leave", leave):
        fleet.stop_worker()
    assert current_or_none() is None
    assert [seen.killed_while_leaving for seen in [*exits, killed(error_file)]] == [True, False]


# Freed large arrays return to the system.

PROGRAM = """
import threading
import numpy as np
from fleetlight.fleet.bootstrap import LARGE_BYTES, limit_malloc_arenas

SIZE = 4 * LARGE_BYTES

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096

def work():
    # glibc keeps what it has seen asked for before
    for _ in range(2):
        np.ones(SIZE, np.uint8)

limit_malloc_arenas()
before = resident()
for _ in range(4):
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
print(resident() - before < SIZE // 2)
"""


@pytest.mark.long
@pytest.mark.slow
def test_freed_memory_returns_to_the_system() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], check=True, capture_output=True, text=True, timeout=100
    )
    assert done.stdout.strip() == "True"


# How a process joins a job with parameter servers.


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
