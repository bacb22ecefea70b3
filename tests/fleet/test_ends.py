# SPDX-License-Identifier: Apache-2.0
"""The end of servers and workers: the status that tells the launcher not to restart them."""

import signal
from pathlib import Path
from unittest import mock

import pytest
from tests.ps.serving import closed_server, open_up, plan, team

import fleetlight as fleet
from fleetlight.collective.group import Group
from fleetlight.errors import PeerLostError
from fleetlight.fleet.bootstrap import join_servers
from fleetlight.fleet.exit import exit_status
from fleetlight.fleet.job import current_or_none, set_current
from fleetlight.fleet.server.job import ServerJob, ServerProcess
from fleetlight.launch.job.layout import JobProcess
from fleetlight.launch.processes.failure import ProcessExit
from fleetlight.launch.status import UNKNOWN, read
from fleetlight.ps import messages as m
from fleetlight.ps.journal.folder import Folder
from fleetlight.ps.server.durability.durability import Durable
from fleetlight.ps.transport.listener import Listener
from fleetlight.ps.worker.served_group import ServedGroup
from fleetlight.roles import Kind, Role
from fleetlight.strategy import DistributedStrategy

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
