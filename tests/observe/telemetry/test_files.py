# SPDX-License-Identifier: Apache-2.0
"""Files of metrics: recorded, thinned out, followed."""

import itertools
import logging
import math
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from fleetlight.observe.telemetry import recorder
from fleetlight.observe.telemetry.history import EventFiles, History, Series
from fleetlight.observe.telemetry.recorder import EventFile, MetricRecorder, ThinnedFile
from fleetlight.observe.telemetry.registry import Registry
from fleetlight.observe.telemetry.snapshot import Event, Snapshot, events_in, snapshots_in


def moment(at: float, **values: float) -> Snapshot:
    return Snapshot(at, 1, values)


def line(snapshot: Snapshot) -> bytes:
    return msgspec.json.encode(snapshot) + b"\n"


def test_a_recorder_writes_a_first_and_a_last_snapshot(tmp_path: Path) -> None:
    registry = Registry()
    registry.add(lambda: {"steps": 4})
    recorded = MetricRecorder(tmp_path, "worker", 2, registry, every_s=3600)
    registry.event("worker 2", "checkpoint", "saved step 4")
    recorded.close()
    recorded.close()
    history = History(tmp_path)
    assert history.poll()
    assert history.series["worker.2"].last("steps") == 4.0
    assert 1 <= len(history.series["worker.2"].times) <= 2
    assert [event.text for event in history.events] == ["saved step 4"]
    assert not history.poll()


def test_nothing_follows_the_last_snapshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    late: list[Callable[[], None]] = []

    class LateThread:
        def __init__(self, target: Callable[[], None], **options: object) -> None:
            late.append(target)

        def start(self) -> None:
            """It gets no processor time before the recorder is closed."""

    monkeypatch.setattr(recorder.threading, "Thread", LateThread)
    MetricRecorder(tmp_path, "worker", 0, Registry()).close()
    [run] = late
    run()
    assert len((tmp_path / "metrics" / "worker.0.jsonl").read_bytes().splitlines()) == 1


def test_values_that_are_not_finite_lose_no_other_metric(tmp_path: Path) -> None:
    registry = Registry()
    registry.add(lambda: {"steps": 4})
    registry.logged.add({"loss": math.nan, "norm": math.inf, "auc": 0.5})
    MetricRecorder(tmp_path, "worker", 0, registry, every_s=3600).close()
    history = History(tmp_path)
    history.poll()
    series = history.series["worker.0"]
    assert series.last("steps") == 4.0
    assert series.last("logged{auc}") == 0.5
    assert math.isnan(series.newest["logged{loss}"])
    assert series.newest["logged{norm}"] == math.inf
    assert (series.last("logged{loss}"), series.last("logged{norm}")) == (None, None)
    assert series.rate("logged{loss}", 10.0) is None


def test_a_source_that_fails_ends_no_recorder(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rounds, is_done = itertools.count(), threading.Event()

    def look() -> None:
        if next(rounds) < 2:
            raise OSError(116, "Stale file handle")
        is_done.set()

    registry = Registry()
    registry.add(lambda: {"steps": 4})
    with caplog.at_level(logging.WARNING, "fleetlight"):
        recorder = MetricRecorder(tmp_path, "worker", 0, registry, every_s=0.0, each_time=look)
        assert is_done.wait(60.0)
        recorder.close()
    assert len([one for one in caplog.messages if "Stale file handle" in one]) == 1


def test_errors_of_two_kinds_are_each_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rounds, is_done = itertools.count(), threading.Event()

    def look() -> None:
        number = next(rounds)
        if number == 4:
            is_done.set()
        raise OSError(5, f"error {number}")

    registry = Registry()
    registry.add(lambda: {"stpes": 4})
    registry.event("worker 0", "checkpoint", "saved step 4")
    with caplog.at_level(logging.WARNING, "fleetlight"):
        recorder = MetricRecorder(tmp_path, "worker", 0, registry, every_s=0.0, each_time=look)
        assert is_done.wait(60.0)
        recorder.close()
    assert len([one for one in caplog.messages if "KeyError: 'stpes'" in one]) == 1
    assert len([one for one in caplog.messages if "OSError" in one]) == 1
    assert [event.text for event in EventFiles(tmp_path).poll()] == ["saved step 4"]


def test_old_lines_are_thinned_out_and_new_ones_stay(tmp_path: Path) -> None:
    path = tmp_path / "metrics" / "worker.0.jsonl"
    file = ThinnedFile(path, max_bytes=2000)
    for at in range(200):
        file.append(msgspec.json.encode(moment(float(at), steps=at)))
    assert path.stat().st_size <= 2000
    times = [one.at for one in snapshots_in(path.read_bytes())]
    assert times == sorted(times)
    assert times[-5:] == [195.0, 196.0, 197.0, 198.0, 199.0]
    assert times[0] < 100.0


def test_a_full_disk_costs_metrics_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    file = ThinnedFile(tmp_path / "metrics" / "worker.0.jsonl")
    monkeypatch.setattr(recorder.os, "write", full)
    file.append(b"{}")
    file.append(b"{}")
    assert caplog.text.count("No space left on device") == 1


def test_a_history_follows_a_file_that_grows_and_is_replaced(tmp_path: Path) -> None:
    folder = tmp_path / "metrics"
    folder.mkdir()
    path, history = folder / "worker.0.jsonl", History(tmp_path)
    assert not history.poll()
    whole = line(moment(1.0, steps=1)) + line(moment(2.0, steps=2))
    # the last line has arrived in part
    path.write_bytes(whole[:-5])
    assert history.poll()
    assert list(history.series["worker.0"].times) == [1.0]
    path.write_bytes(whole)
    history.poll()
    assert list(history.series["worker.0"].times) == [1.0, 2.0]
    other = folder / "new"
    other.write_bytes(line(moment(2.0, steps=2)) + line(moment(3.0, steps=3)))
    other.rename(path)
    history.poll()
    assert list(history.series["worker.0"].columns["steps"]) == [1.0, 2.0, 3.0]


def test_a_clock_that_is_set_back_hides_no_metric(tmp_path: Path) -> None:
    file = ThinnedFile(tmp_path / "metrics" / "worker.0.jsonl", max_bytes=2000)
    history = History(tmp_path)
    at = 5000.0
    for step in range(100):
        at = 1000.0 if step == 50 else at + 1.0
        file.append(line(moment(at, steps=step)).rstrip())
        history.poll()
        assert history.series["worker.0"].last("steps") == step
    series = history.series["worker.0"]
    assert list(series.times) == [1000.0 + i for i in range(50)]
    assert list(series.columns["steps"]) == [50.0 + i for i in range(50)]


def test_a_late_line_of_a_replaced_process_is_left_out(tmp_path: Path) -> None:
    series = Series()
    for at in (5.0, 6.0):
        series.add(Snapshot(at, 7, {"steps": at}))
    series.add(Snapshot(8.0, 9, {"steps": 0.0}))
    series.add(Snapshot(7.0, 7, {"steps": 7.0}))
    series.add(Snapshot(9.0, 9, {"steps": 1.0}))
    series.add(Snapshot(8.5, 7, {"steps": 8.0}))
    assert list(series.times) == [5.0, 6.0, 8.0, 9.0]
    # a new process whose clock is behind
    for at in (3.0, 4.0):
        series.add(Snapshot(at, 11, {"steps": at}))
    assert list(series.times) == [4.0]


def test_damaged_lines_are_left_out(tmp_path: Path) -> None:
    data = b'{"at": 1\n' + line(moment(2.0, steps=2)) + b"\0\0\n"
    assert [one.at for one in snapshots_in(data)] == [2.0]
    assert list(events_in(data)) == []


def test_events_of_several_files_are_in_the_order_of_time(tmp_path: Path) -> None:
    for at, name in ((2.0, "a"), (1.0, "b")):
        EventFile(tmp_path, name, "fleetrun", clock=lambda at=at: at).add("start", name)
    history = History(tmp_path)
    history.poll()
    assert [event.text for event in history.events] == ["b", "a"]


@pytest.mark.parametrize("set_back_at", [None, 50])
def test_events_are_new_once_although_their_file_is_thinned_out(
    tmp_path: Path, set_back_at: int | None
) -> None:
    files, path = EventFiles(tmp_path), tmp_path / "metrics" / "events.a.jsonl"
    file = ThinnedFile(path, max_bytes=1000)
    seen: list[float] = []
    sizes = []
    times = [float(at) for at in range(100)]
    if set_back_at is not None:
        times[set_back_at:] = [at - 70.0 for at in times[set_back_at:]]
    for at in times:
        file.append(msgspec.json.encode(Event(at, "worker 0", "checkpoint", "saved")))
        sizes.append(path.stat().st_size)
        seen += [event.at for event in files.poll()]
    assert sorted(sizes) != sizes
    assert seen == times
    assert files.poll() == []


def test_a_series_has_columns_for_metrics_that_come_and_go() -> None:
    series = Series(most=8)
    series.add(moment(1.0, steps=1))
    series.add(moment(2.0, steps=2, samples=20))
    series.add(moment(3.0, samples=30))
    assert [str(v) for v in series.columns["samples"]] == ["nan", "20.0", "30.0"]
    assert (series.last("steps"), series.last("samples")) == (None, 30.0)
    for at in range(4, 40):
        series.add(moment(float(at), steps=at))
    assert len(series.times) <= 8
    assert {len(column) for column in series.columns.values()} == {len(series.times)}
    assert series.times[-1] == 39.0
