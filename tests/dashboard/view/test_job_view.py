# SPDX-License-Identifier: Apache-2.0
"""What the page shows of a job, from simulated metrics of its processes."""

import math
import random
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.dashboard.simulated import USUAL, SimulatedJob

from fleetlight.dashboard.job_files import JobFiles
from fleetlight.dashboard.view.facts import LogFolderFacts
from fleetlight.dashboard.view.job_view import Cursor, JobView
from fleetlight.dashboard.view.timeline import Timeline
from fleetlight.observe.telemetry.catalogue import STEP_PARTS
from fleetlight.observe.telemetry.history import History

#: seconds of a usual step
STEP_S = sum(USUAL.values())


class Follower:
    """A view that follows a simulated job, and a page that follows the view."""

    def __init__(self, job: SimulatedJob) -> None:
        self.job = job
        self._history, self._files = History(job.folder), JobFiles(job.folder)
        self.view = JobView()
        self._cursor: Cursor | None = None
        self.shown: dict[str, Any] = {}

    def poll(self, later: float = 0.5) -> dict[str, Any]:
        """The whole view, `later` seconds after the last metrics."""
        self._history.poll()
        self.view.update(self._history, self._files.read(), self.job.at + later)
        return self.view.whole()

    def row(self, name: str, later: float = 0.5) -> dict[str, Any]:
        rows = self.poll(later)["processes"]
        return next(row for row in rows if row["name"] == name)

    def news(self) -> tuple[str, dict[str, Any]]:
        """What a page gets that has read everything so far."""
        self.poll()
        news = None if self._cursor is None else self.view.news(self._cursor)
        self._cursor = self.view.cursor
        return ("whole", self.view.whole()) if news is None else ("news", news)


@pytest.fixture
def job(tmp_path: Path) -> SimulatedJob:
    return SimulatedJob(tmp_path, workers=3, servers=2)


def test_rates_and_parts_of_a_step(job: SimulatedJob) -> None:
    job.launcher()
    job.run(30)
    row = Follower(job).row("worker 1")
    assert row["state"] == "running"
    assert row["step"] == int(30 / STEP_S)
    assert row["rate"] == pytest.approx(512 / STEP_S, rel=0.02)
    assert row["step_s"] == pytest.approx(STEP_S, rel=0.02)
    assert dict(zip(STEP_PARTS, row["parts"], strict=True)) == pytest.approx(USUAL, rel=0.02)
    assert (row["part"], row["hit"]) == ("backward", 0.9)
    assert (row["sent"], row["received"]) == (1e6, 3e6)


def test_the_slow_worker_and_the_part_that_makes_it_slow(job: SimulatedJob) -> None:
    job.workers[2].parts["data"] = 0.2
    job.run(20)
    found = Follower(job).poll()["straggler"]
    assert (found["name"], found["part"], found["holds"]) == ("worker 2", "data", False)
    assert found["times"] == pytest.approx((STEP_S + 0.195) / STEP_S, rel=0.05)
    assert found["others"] == pytest.approx(USUAL["data"], rel=0.05)


def test_the_worker_that_the_others_wait_for(job: SimulatedJob) -> None:
    """Steps of all take the same time, since two workers wait for the third."""
    for worker in job.workers[:2]:
        worker.parts["wait"] += 0.2
    job.workers[2].parts["forward"] += 0.2
    job.run(20)
    found = Follower(job).poll()["straggler"]
    assert (found["name"], found["part"], found["holds"]) == ("worker 2", "forward", True)


def test_equal_workers_have_no_straggler(job: SimulatedJob) -> None:
    job.run(20)
    assert Follower(job).poll()["straggler"] is None


def test_a_killed_worker_shows_before_its_metrics_end(job: SimulatedJob) -> None:
    job.launcher()
    job.run(10)
    follower = Follower(job)
    assert follower.row("worker 1")["state"] == "running"
    job.statuses["worker 1"] = -9
    job.launcher()
    row = follower.row("worker 1")
    assert (row["state"], row["detail"]) == ("failed", "killed by SIGKILL")
    assert "rate" not in row


def test_a_process_without_metrics_is_silent_then_starts_again(job: SimulatedJob) -> None:
    job.launcher()
    job.run(10)
    follower = Follower(job)
    assert follower.row("server 0", later=6.0)["state"] == "silent"
    job.workers[1].pid, job.workers[1].seconds = 7777, 0.0
    job.restarts["worker 1"] = 1
    job.launcher()
    job.run(3)
    row = follower.row("worker 1")
    assert (row["state"], row["pid"], row["restarts"]) == ("running", 7777, 1)
    # counters started at zero: no negative rate, and none of the time before
    assert row["rate"] == pytest.approx(512 / STEP_S, rel=0.1)
    assert all(value is None or value >= 0 for value in follower.view.whole()["lines"]["rate"])


def test_tables_grow_and_memory_ends(job: SimulatedJob) -> None:
    job.growth = 1000.0
    job.launcher()
    job.run(90)
    whole = Follower(job).poll()
    users = next(table for table in whole["tables"] if table["name"] == "users")
    assert users["rows"] == 2 * (1e6 + 90_000)
    assert users["growth"] == pytest.approx(2 * 60_000)
    assert (users["balance"], set(users["servers"])) == (1.0, {"server 0", "server 1"})
    [memory] = whole["memory"]
    assert memory["growth"] == pytest.approx(2 * 2 * 64 * 1000)
    assert memory["hours"] == pytest.approx(memory["free"] / memory["growth"] / 3600, rel=0.01)
    assert whole["lines"]["rows"]["users"][-1] == pytest.approx(users["rows"], rel=0.01)


def test_a_table_that_appears_late_grows_from_then_on(job: SimulatedJob) -> None:
    job.tables = {}
    job.run(10)
    job.tables, job.growth = {"late": 0.0}, 50.0
    job.run(10)
    [late] = Follower(job).poll()["tables"]
    assert late["growth"] == pytest.approx(2 * 50 * 60)


def test_lines_of_a_killed_worker_have_a_gap(job: SimulatedJob) -> None:
    job.workers[0].logged["loss"] = 0.5
    job.run(10)
    job.statuses["worker 0"] = -9
    job.run(10)
    lines = Follower(job).poll()["lines"]
    assert lines["step"]["worker.0"][-5:] == [None] * 5
    assert lines["logged"]["loss"][-5:] == [None] * 5
    assert lines["rate"][-5] == pytest.approx(2 * 512 / STEP_S, rel=0.1)


def test_staleness_of_all_servers(job: SimulatedJob) -> None:
    job.run(10)
    whole = Follower(job).poll()
    assert whole["staleness"]["bars"] == [200, 400, 0, 200]
    assert whole["staleness"]["mean"] == 1.25
    assert whole["lines"]["staleness"][-1] == 1.25


def test_many_values_of_staleness_share_the_last_bar(job: SimulatedJob) -> None:
    job.run(1)
    job.at += 1
    job.record("server", 0, 2000, {}, {"staleness": {0: 1, 1000: 2, 5000: 3}})
    bars = Follower(job).poll()["staleness"]["bars"]
    assert (len(bars), bars[-1]) == (24, 5)


def test_logged_values_are_means_over_workers(job: SimulatedJob) -> None:
    for worker, loss in zip(job.workers, (0.1, 0.2, 0.6), strict=True):
        worker.logged["loss"] = loss
    job.run(5)
    assert Follower(job).poll()["lines"]["logged"]["loss"][0] == pytest.approx(0.3)


@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_makes_a_gap(job: SimulatedJob, odd: float) -> None:
    for worker in job.workers:
        worker.logged = {"loss": 0.5, "auc": 0.75}
    follower, lines = Follower(job), []
    for loss in (0.5, odd, 0.5):
        job.workers[1].logged["loss"] = loss
        job.run(5)
        whole = msgspec.json.decode(msgspec.json.encode(follower.poll(later=3.0)))
        lines.append(whole["not_finite"])
    assert lines == [[], ["loss"], []]
    assert whole["lines"]["logged"]["loss"] == [0.5] * 5 + [None] * 5 + [0.5] * 5
    assert whole["lines"]["logged"]["auc"] == [0.75] * 15
    assert follower.row("worker 1")["state"] == "running"


def test_a_script_that_invents_names_fills_no_page(job: SimulatedJob) -> None:
    job.workers[0].logged = {f"value{n}": 1.0 for n in range(500)}
    job.run(3)
    assert len(Follower(job).poll()["lines"]["logged"]) == 32


def test_a_page_gets_everything_once_and_then_what_is_new(job: SimulatedJob) -> None:
    follower = Follower(job)
    job.launcher()
    job.run(60)
    job.event("worker 1", "exit", "worker 1 was killed")
    kind, whole = follower.news()
    assert kind == "whole"
    lines = whole["lines"]["step"]["worker.0"]
    for _ in range(20):
        job.run(1)
        kind, news = follower.news()
        assert kind == "news"
        assert news["events"] == []
        lines[news["lines"]["first"] :] = news["lines"]["step"]["worker.0"]
        assert len(news["lines"]["times"]) <= 5
    job.event("worker 1", "restart", "worker 1 restarts")
    job.run(1)
    _, news = follower.news()
    assert [event["kind"] for event in news["events"]] == ["restart"]
    lines[news["lines"]["first"] :] = news["lines"]["step"]["worker.0"]
    assert lines == follower.view.whole()["lines"]["step"]["worker.0"]


def test_a_page_gets_everything_again_when_the_axis_changes(job: SimulatedJob) -> None:
    follower = Follower(job)
    job.run(390)
    assert follower.news()[0] == "whole"
    job.run(20)
    kind, whole = follower.news()
    assert kind == "whole"
    assert len(whole["lines"]["times"]) == 204


def test_a_finished_job_has_means_of_its_whole_time(job: SimulatedJob) -> None:
    job.run(30)
    names = [f"worker {n}" for n in range(3)] + ["server 0", "server 1"]
    job.statuses, job.code = dict.fromkeys(names, 0), 0
    job.launcher(ended=True)
    whole = Follower(job).poll(later=9999.0)
    assert (whole["over"], whole["code"]) == (True, 0)
    worker = next(row for row in whole["processes"] if row["name"] == "worker 0")
    assert (worker["state"], worker["step_s"]) == ("ended", pytest.approx(STEP_S, rel=0.02))


def test_damaged_metrics_are_left_out(job: SimulatedJob) -> None:
    job.run(3)
    with (job.folder / "metrics" / "worker.0.jsonl").open("ab") as file:
        file.write(b'{"at": 1, "pid"\nnot json\n{"at":"x"}\n')
    job.run(3)
    assert Follower(job).row("worker 0")["step"] == int(6 / STEP_S)


def test_a_folder_without_a_job_is_empty(tmp_path: Path) -> None:
    view = JobView()
    view.update(History(tmp_path), LogFolderFacts(), 1e9)
    whole = view.whole()
    assert (whole["processes"], whole["lines"]["times"], whole["tables"]) == ([], [], [])


@pytest.mark.slow
def test_messages_of_64_workers_are_small(tmp_path: Path) -> None:
    """A second of 64 workers and 4 servers; the first message has five minutes."""
    job = SimulatedJob(tmp_path, workers=64, servers=4)
    follower, jitter = Follower(job), random.Random(0)
    job.launcher()
    job.run(299, jitter)
    assert len(msgspec.json.encode(follower.news()[1])) < 300_000
    job.run(1, jitter)
    kind, news = follower.news()
    assert kind == "news"
    assert len(msgspec.json.encode(news)) < 40_000


# -- states of processes: from the launcher's record, and of other machines from events


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


# -- one axis of time for all processes, with a maximum of moments


def test_an_interval_counts_in_each_bin_that_it_covers() -> None:
    timeline = Timeline()
    timeline.start = 100.0
    timeline.spread("rate", 100.5, 102.5, total=20.0, count=2.0)
    timeline.spread("rate", 102.5, 103.0, total=20.0, count=0.5)
    assert timeline.times() == [100.5, 101.5, 102.5, 103.5]
    # in bin 102, 5 in half a second, then 20 in the other half
    assert timeline.line("rate") == pytest.approx([10.0, 10.0, 25.0, math.nan], nan_ok=True)


def test_newest_values_stay_as_they_are() -> None:
    timeline = Timeline()
    timeline.put("rows", 10.2, 3.0)
    timeline.put("rows", 10.9, 4.0)
    timeline.put("rows", 12.1, 5.0)
    assert timeline.line("rows") == pytest.approx([4.0, math.nan, 5.0], nan_ok=True)
    assert timeline.line("rows", first=2) == [5.0]


def test_two_bins_become_one_when_there_are_too_many() -> None:
    timeline = Timeline(most=4)
    for second in range(8):
        timeline.spread("step", second, second + 0.99, total=1.0, count=float(1 + second % 2))
        timeline.put("rows", second, float(second))
    assert (timeline.bins, timeline.width, timeline.generation) == (4, 2.0, 1)
    assert timeline.line("step") == pytest.approx([2 / 3] * 4)
    assert timeline.line("rows") == [1.0, 3.0, 5.0, 7.0]


def test_a_job_of_days_keeps_the_maximum() -> None:
    timeline = Timeline(most=100)
    for hour in range(24 * 14):
        timeline.put("rows", 3600.0 * hour, float(hour))
    assert timeline.bins <= 100
    assert timeline.line("rows")[-1] == 24 * 14 - 1


def test_moments_before_the_start_are_left_out() -> None:
    timeline = Timeline()
    timeline.start = 100.0
    timeline.put("rows", 99.0, 1.0)
    timeline.spread("rate", 98.0, 100.5, total=5.0, count=2.5)
    assert timeline.line("rows") == pytest.approx([math.nan], nan_ok=True)
    assert timeline.line("rate") == [2.0]


def test_unknown_lines_have_no_values() -> None:
    timeline = Timeline()
    timeline.put("rows", 1.0, 1.0)
    assert all(map(math.isnan, timeline.line("other")))
