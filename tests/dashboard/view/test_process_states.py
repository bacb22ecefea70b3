# SPDX-License-Identifier: Apache-2.0
"""States of processes: from the launcher's record, and of other machines from events."""

from pathlib import Path
from typing import Any

import pytest
from tests.dashboard.simulated import SimulatedJob

from fleetlight.dashboard.job_files import JobFiles
from fleetlight.dashboard.view.job_view import Cursor, JobView
from fleetlight.observe.telemetry.history import History


class Watched:
    """A simulated job and its view."""

    def __init__(self, folder: Path) -> None:
        self.job = SimulatedJob(folder, workers=2, servers=0)
        self._history, self._files = History(folder), JobFiles(folder)
        self._view = JobView()

    def row(self, name: str, later: float = 0.5) -> dict[str, Any]:
        self._history.poll()
        self._view.update(self._history, self._files.read(), self.job.at + later)
        rows = self._view.whole()["processes"]
        return next(row for row in rows if row["name"] == name)

    @property
    def cursor(self) -> Cursor:
        return self._view.cursor

    def times(self) -> list[float]:
        found: list[float] = self._view.whole()["lines"]["times"]
        return found

    def is_new_for(self, cursor: Cursor) -> bool:
        """True if a client with this cursor gets everything."""
        return self._view.news(cursor) is None

    def is_up(self, index: int) -> bool:
        return self._view.readings(self.job.at + 0.5)[index].is_up


@pytest.fixture
def watched(tmp_path: Path) -> Watched:
    return Watched(tmp_path)


@pytest.fixture
def remote(watched: Watched, tmp_path: Path) -> Watched:
    """Worker 1 runs on a machine whose launcher has its record elsewhere."""
    job = watched.job
    job.launcher(only=["worker 0"])
    (tmp_path / "endpoints.log").write_text("job x\nworker 1 10.0.0.2:3\n")
    job.event("worker 1", "start", "started, pid 1001", pid=1001, host="10.0.0.2")
    job.run(10)
    return watched


def test_a_restarted_process_is_starting_until_its_first_snapshot(watched: Watched) -> None:
    job = watched.job
    job.launcher()
    job.run(10)
    assert watched.row("worker 1")["state"] == "running"
    job.workers[1].pid, job.workers[1].seconds = 7777, 0.0
    job.restarts["worker 1"] = 1
    job.launcher()
    row = watched.row("worker 1")
    assert (row["state"], row["pid"], row["restarts"]) == ("starting", 7777, 1)
    assert (row["step"], row["stepped"]) == (None, None)
    assert not {"rate", "pace", "parts", "memory"} & row.keys()
    assert not watched.is_up(1)
    job.run(3)
    assert watched.row("worker 1")["state"] == "running"
    assert watched.is_up(1)


def test_a_clock_that_is_set_back_stops_no_metric(watched: Watched) -> None:
    job = watched.job
    job.launcher()
    job.run(60)
    before, before_cursor = watched.row("worker 1"), watched.cursor
    job.at -= 30.0
    job.run(5)
    row = watched.row("worker 1")
    assert row["state"] == "running"
    assert row["step"] > before["step"]
    assert row["stepped"] == job.at
    assert row["rate"] > 0
    # the chart restarts, too, for clients that have the later moments
    times = watched.times()
    assert job.at - 10 < times[0] <= times[-1] <= job.at
    assert watched.is_new_for(before_cursor)


def test_a_process_that_does_not_arrive_is_silent_at_last(watched: Watched) -> None:
    job = watched.job
    job.run(10)
    job.workers[1].pid = 7777
    job.at += 2
    job.event("worker 1", "restart", "restart 1, pid 7777", pid=7777, restart=1)
    job.launcher()
    assert watched.row("worker 1", later=60.0)["state"] == "starting"
    assert watched.row("worker 1", later=400.0)["state"] == "silent"


def test_a_script_may_train_in_a_process_of_its_own(watched: Watched) -> None:
    job = watched.job
    job.event("worker 1", "start", "started, pid 1001", pid=1001)
    job.launcher()
    job.workers[1].pid = 5555
    job.run(10)
    row = watched.row("worker 1")
    assert row["state"] == "running"
    assert row["rate"] > 0


@pytest.mark.parametrize(
    ("status", "state", "detail"),
    [(0, "ended", "exit code 0"), (-9, "failed", "killed by SIGKILL")],
)
def test_a_process_of_another_machine_that_ends(
    remote: Watched, status: int, state: str, detail: str
) -> None:
    job = remote.job
    row = remote.row("worker 1")
    assert (row["state"], row["host"], row["pid"]) == ("running", "10.0.0.2", 1001)
    job.event("worker 1", "exit", "exited", pid=1001, status=status)
    row = remote.row("worker 1")
    assert (row["state"], row["detail"]) == (state, detail)


def test_a_process_of_another_machine_that_restarts(remote: Watched) -> None:
    job = remote.job
    job.event("worker 1", "exit", "was killed", pid=1001, status=-9)
    job.at += 1
    job.event("worker 1", "restart", "restart 1, pid 8888", pid=8888, restart=1)
    row = remote.row("worker 1")
    assert (row["state"], row["pid"], row["restarts"]) == ("starting", 8888, 1)
    job.workers[1].pid = 8888
    job.run(3)
    assert remote.row("worker 1")["state"] == "running"


def test_a_process_of_another_machine_that_fails_before_its_first_metrics(remote: Watched) -> None:
    job = remote.job
    job.event("worker 2", "start", "started, pid 9", pid=9, host="10.0.0.3")
    job.event("worker 2", "exit", "exited with code 3", pid=9, status=3)
    row = remote.row("worker 2")
    assert (row["state"], row["host"], row["detail"]) == ("failed", "10.0.0.3", "exit code 3")


def test_no_process_outlasts_its_job(remote: Watched) -> None:
    job = remote.job
    job.statuses["worker 0"], job.code = 0, 0
    job.launcher(ended=True, only=["worker 0"])
    row = remote.row("worker 1", later=9999.0)
    assert (row["state"], row["detail"]) == ("ended", "")
    assert row["step_s"] > 0
