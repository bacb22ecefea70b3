# SPDX-License-Identifier: Apache-2.0
"""The folders in which servers and workers keep durable state."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.ps.serving import plan

from fleetlight.collective.group import Group
from fleetlight.errors import JournalError
from fleetlight.fleet.plan.durability_dir import durable_of, remains_of, worker_journal_of
from fleetlight.fleet.server.job import ServerJob
from fleetlight.ps import messages as m
from fleetlight.ps.journal.folder import Folder, FolderIdentity
from fleetlight.ps.resume import KEPT, NOTHING
from fleetlight.ps.worker.replay.commit_log import ResumePoint
from fleetlight.ps.worker.replay.step_journal import NoJournal, StepOrigin
from fleetlight.ps.worker.replay.worker_journal import WorkerJournal
from fleetlight.roles import Kind, Role
from fleetlight.strategy import DistributedStrategy


def test_folder_does_not_follow_a_change_of_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    strategy = DistributedStrategy(durability="log", durability_configs={"folder": "kept"})
    server = Role(kind=Kind.SERVER, server_num=1, job="a job")
    context = ServerJob(
        role=server,
        group=Group(deadline_s=20.0),
        strategy=strategy,
        process=SimpleNamespace(stop=lambda: None),  # type: ignore[arg-type]
    )
    journal = worker_journal_of(Role(server_num=1, job="a job", max_restarts=1), strategy, 0, 5)
    assert isinstance(journal, WorkerJournal)
    monkeypatch.chdir(tmp_path / "elsewhere")
    durable = durable_of(context)
    assert durable is not None
    assert durable.path == tmp_path / "kept" / "server-0-of-1"
    push = m.Push(1, 0, 0, 1, 0, [], [], False)
    journal.commit(StepOrigin(0, 0, 0, ResumePoint(0, 0, 0, b"")), 0, [1], {0: [(push, [])]})
    journal.close(is_needed=True)
    assert (tmp_path / "kept" / "worker-0-of-1").is_dir()
    assert not (tmp_path / "elsewhere" / "kept").exists()


def test_server_reports_the_state_of_an_earlier_launch(tmp_path: Path) -> None:
    strategy = DistributedStrategy(durability="log", durability_configs={"folder": str(tmp_path)})
    role = Role(kind=Kind.SERVER, index=0, server_num=1, worker_num=2, job="a job", resume=True)
    assert remains_of(role, strategy).state == NOTHING  # type: ignore[union-attr]
    Folder.open(tmp_path / "server-0-of-1", FolderIdentity(0, 1, "a job", plan())).close()
    # only this server was restarted
    assert remains_of(role, strategy) is None
    later = role.replace(job="another launch")
    assert remains_of(later, strategy).state == KEPT  # type: ignore[union-attr]
    assert remains_of(later.replace(resume=False), strategy) is None
    with pytest.raises(JournalError, match=r"with 2 worker\(s\) has left.*this one has 3"):
        remains_of(later.replace(worker_num=3), strategy)


def test_worker_keeps_a_journal_for_a_launch_that_resumes(tmp_path: Path) -> None:
    """Also when the launcher does not restart it alone."""
    configs = {"folder": str(tmp_path)}
    strategy = DistributedStrategy(durability="log", durability_configs=configs)
    for role in (Role(server_num=1), Role(server_num=1, job="a job", max_restarts=0)):
        journal = worker_journal_of(role, strategy, 0, 5)
        assert isinstance(journal, WorkerJournal)
        journal.close(is_needed=False)
    assert isinstance(worker_journal_of(role, DistributedStrategy(), 0, 5), NoJournal)
