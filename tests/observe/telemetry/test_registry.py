# SPDX-License-Identifier: Apache-2.0
"""What a snapshot has: all sources, logged values, few labels."""

import errno
import itertools
import logging
import math
import os
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fleetlight.errors import ConfigError
from fleetlight.observe.telemetry import recorder
from fleetlight.observe.telemetry.catalogue import METRICS, STEP_PARTS, MetricKind, step_metric
from fleetlight.observe.telemetry.history import EventFiles, History, Series
from fleetlight.observe.telemetry.job_metrics import job_metrics
from fleetlight.observe.telemetry.logged_values import MAX_NAMES
from fleetlight.observe.telemetry.recorder import EventFile, MetricRecorder, ThinnedFile
from fleetlight.observe.telemetry.registry import MAX_LABELS, Registry
from fleetlight.observe.telemetry.snapshot import (
    Event,
    Snapshot,
    events_in,
    labelled,
    snapshots_in,
    split_key,
)
from fleetlight.observe.telemetry.step_times import BACKWARD, DATA, FORWARD, PULL, StepTimes


def test_sources_are_asked_until_they_are_removed() -> None:
    registry = Registry()
    remove = registry.add(lambda: {"steps": 3})
    registry.add(lambda: {"staleness": {0: 2, 1: 1}})
    snapshot = registry.snapshot()
    assert snapshot.values["steps"] == 3.0
    assert snapshot.values["cpu_seconds"] > 0
    assert snapshot.values["resident_bytes"] > 1 << 20
    assert snapshot.counts == {"staleness": {0: 2, 1: 1}}
    remove()
    assert "steps" not in registry.snapshot().values


def test_a_source_that_fails_leaves_the_others() -> None:
    registry = Registry()
    registry.add(lambda: {"steps": 1 / 0})
    registry.add(lambda: {"samples": 2})
    assert registry.snapshot().values["samples"] == 2.0
    assert "steps" not in registry.snapshot().values


def test_a_name_outside_the_catalogue_is_an_error() -> None:
    registry = Registry()
    registry.add(lambda: {"stpes": 1})
    with pytest.raises(KeyError, match="stpes"):
        registry.snapshot()


def test_labels_beyond_the_limit_are_dropped_and_counted() -> None:
    registry = Registry()
    registry.add(lambda: {labelled("table_rows", str(n)): n for n in range(MAX_LABELS + 7)})
    values = registry.snapshot().values
    assert sum(key.startswith("table_rows") for key in values) == MAX_LABELS
    assert values["dropped_labels"] == 7.0


def test_logged_values_are_means_since_the_last_snapshot() -> None:
    registry = Registry()
    for value in (1.0, torch.tensor(3.0, requires_grad=True)):
        registry.logged.add({"loss": value})
    assert registry.snapshot(takes=False).values["logged{loss}"] == 2.0
    assert registry.snapshot().values["logged{loss}"] == 2.0
    # without new values, the last one
    assert registry.snapshot().values["logged{loss}"] == 2.0
    registry.logged.add({"loss": 8, "auc": 0.5})
    values = registry.snapshot().values
    assert (values["logged{loss}"], values["logged{auc}"]) == (8.0, 0.5)


def test_a_tensor_that_changes_later_was_logged_as_it_was() -> None:
    registry, value = Registry(), torch.tensor([2.0])
    registry.logged.add({"loss": value})
    value.zero_()
    assert registry.snapshot().values["logged{loss}"] == 2.0


def test_a_nan_shows() -> None:
    registry = Registry()
    registry.logged.add({"loss": 1.0})
    registry.logged.add({"loss": float("nan")})
    assert math.isnan(registry.snapshot().values["logged{loss}"])


def test_many_values_between_snapshots_take_little_memory() -> None:
    registry = Registry()
    for value in range(10_000):
        registry.logged.add({"step": float(value), "loss": torch.tensor(value, dtype=torch.half)})
    assert registry.logged.now()["logged{step}"] == 4999.5
    assert len(registry.logged._waiting["step"]._values) < 5000
    values = registry.snapshot().values
    assert values["logged{step}"] == 4999.5
    assert values["logged{loss}"] == pytest.approx(4999.5, rel=1e-3)


def test_names_beyond_the_limit_take_no_memory(caplog: pytest.LogCaptureFixture) -> None:
    registry = Registry()
    with caplog.at_level(logging.WARNING, "fleetlight"):
        for number in range(MAX_NAMES + 500):
            registry.logged.add({f"loss_{number}": 1.0, "loss_0": 2.0})
    [warned] = caplog.messages
    assert f"got 'loss_{MAX_NAMES}' after {MAX_NAMES} other names" in warned
    values = registry.snapshot().values
    assert sum(key.startswith("logged{") for key in values) == MAX_NAMES
    assert values["dropped_values"] == 500.0
    assert len(registry.logged._last) == len(registry.logged._names) == MAX_NAMES


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("loss", torch.zeros(3), r"got a tensor of shape \(3,\), expected one number"),
        ("loss", torch.tensor(1j), "got a complex tensor, expected a real number"),
        ("loss", "high", "got 'high' \\(str\\), expected one number"),
        ("a{b}", 1.0, "expected 1 to 64 characters without braces"),
        ("x" * 65, 1.0, "expected 1 to 64 characters"),
    ],
)
def test_nonsense_is_refused(name: str, value: object, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        Registry().logged.add({name: value})


def test_events_are_taken_once() -> None:
    registry = Registry(clock=lambda: 5.0)
    registry.event("worker 0", "checkpoint", "saved step 3")
    assert [(one.at, one.kind) for one in registry.take_events()] == [(5.0, "checkpoint")]
    assert registry.take_events() == []
    assert registry.snapshot().values["checkpoint_time_seconds"] == 5.0


def test_keys_have_names_and_labels() -> None:
    assert split_key(labelled("table_rows", "users")) == ("table_rows", "users")
    assert split_key("steps") == ("steps", "")


def test_the_catalogue_is_complete() -> None:
    for name, metric in METRICS.items():
        assert name == metric.name
        assert metric.help
        ending = {"s": "_seconds", "bytes": "_bytes"}.get(metric.unit)
        assert ending is None or name.endswith(ending), name
        assert metric.kind is not MetricKind.COUNTS or not metric.label


# -- the parts of a step's time: exclusive, of one thread, and complete


class Clock:
    """Each reading is one second later."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


def test_a_part_inside_another_counts_once() -> None:
    times = StepTimes(Clock())
    times.begin()
    # the forward from 1 to 2 and from 3 to 4, the pull from 2 to 3; the reading is at 5
    with times.part(FORWARD), times.part(PULL):
        pass
    found = times.metrics()
    assert (found[step_metric("forward")], found[step_metric("pull")]) == (2.0, 1.0)
    assert found[step_metric("other")] == 1.0


def test_the_time_before_the_first_part_does_not_count() -> None:
    clock = Clock()
    times = StepTimes(clock)
    times.begin()
    clock.now = 1000.0
    with times.part(DATA):
        pass
    assert sum(times.metrics().values()) == 2.0


def test_nothing_counts_before_the_beginning_or_in_another_thread() -> None:
    times = StepTimes(Clock())
    assert times.enter(DATA) == -1
    assert times.metrics() == {}
    times.begin()
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(times.enter(BACKWARD)))
    thread.start()
    thread.join()
    assert found == [-1]
    assert sum(times.metrics().values()) == 0.0


@given(st.lists(st.integers(0, len(STEP_PARTS) - 2)))
def test_the_parts_add_up_to_the_whole_time(parts: list[int]) -> None:
    clock = Clock()
    times = StepTimes(clock)
    times.begin()
    begun = [times.enter(part) for part in parts]
    for before in reversed(begun):
        times.leave(before)
    # from the first reading to the one of `metrics`
    whole = clock.now if parts else 0.0  # metrics() advances the clock
    assert sum(times.metrics().values()) == whole


def test_an_error_leaves_the_part() -> None:
    times = StepTimes(Clock())
    times.begin()
    try:
        with times.part(PULL):
            raise ValueError
    except ValueError:
        pass
    before = times.metrics()[step_metric("pull")]
    with times.part(DATA):
        pass
    assert times.metrics()[step_metric("pull")] == before


def test_all_parts_are_in_the_catalogue() -> None:
    assert {step_metric(part) for part in STEP_PARTS} <= METRICS.keys()


# -- the growth and the rates of metrics over time


def series(*moments: tuple[float, int, dict[str, float]]) -> Series:
    """A process by its moments: the time, the process id and the metrics."""
    made = Series()
    for at, pid, values in moments:
        made.add(Snapshot(at, pid, values))
    return made


def test_a_rate_is_that_of_the_last_seconds() -> None:
    one = series(*((float(at), 1, {"steps": at**2}) for at in range(11)))
    assert one.window(4.0) == (6, 10)
    assert one.rate("steps", 4.0) == (100 - 36) / 4
    assert one.rate("steps", math.inf) == 10.0
    assert one.rate("samples", 4.0) is None


def test_a_rate_may_be_negative() -> None:
    assert series((0.0, 1, {"rows": 9}), (2.0, 1, {"rows": 5})).rate("rows", 10.0) == -2.0


def test_moments_that_are_far_apart_give_a_rate() -> None:
    one = series((0.0, 1, {"steps": 0}), (100.0, 1, {"steps": 50}), (200.0, 1, {"steps": 150}))
    assert one.window(10.0) == (1, 2)
    assert one.rate("steps", 10.0) == 1.0


def test_one_moment_gives_no_rate() -> None:
    assert Series().rate("steps", 10.0) is None
    one = series((5.0, 1, {"steps": 3}))
    assert one.window(10.0) == (0, 0)
    assert one.rate("steps", 10.0) is None


def test_a_restarted_process_counts_from_zero() -> None:
    moments = [(0.0, 1, {"samples": 1000.0}), (1.0, 1, {"samples": 1100.0})]
    assert series(*moments, (2.0, 2, {"samples": 10.0})).rate("samples", 10.0) is None
    again = series(*moments, (2.0, 2, {"samples": 10.0}), (3.0, 2, {"samples": 30.0}))
    assert again.window(10.0) == (2, 3)
    assert again.rate("samples", 10.0) == 20.0


def test_a_metric_that_appears_late_grows_from_its_first_value() -> None:
    one = series((0.0, 1, {}), (1.0, 1, {"rows": 100}), (3.0, 1, {"rows": 140}))
    assert one.rate("rows", 10.0) == 20.0
    assert one.grown("rows", 0, 2) == 140.0, "a counter begins at zero"
    one.add(Snapshot(4.0, 1, {}))
    assert one.rate("rows", 10.0) is None
    assert one.grown("rows", 0, 3) == 0.0


@pytest.mark.parametrize(("key", "grown"), [("steps", 3.0), ("rows", 0.0), ("none", 0.0)])
def test_growth_between_two_moments(key: str, grown: float) -> None:
    one = series((0.0, 1, {"steps": 4, "rows": 9}), (1.0, 1, {"steps": 7, "rows": 5}))
    assert one.grown(key, 0, 1) == grown


def test_a_file_system_that_does_not_reply_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stale(*_: object) -> list[str]:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    monkeypatch.setattr(os, "listdir", stale)
    assert not History(tmp_path).poll()


# -- metrics of a whole job from those of its processes


def made_of(*moments: tuple[float, dict[str, float]], pid: int = 1, **counts: object) -> Series:
    made = Series()
    for at, values in moments:
        made.add(Snapshot(at, pid, values, counts))  # type: ignore[arg-type]
    return made


def test_workers_add_up_or_average() -> None:
    first = made_of(
        (0.0, {"samples": 0, "steps": 0}), (10.0, {"samples": 100, "steps": 10, "logged{loss}": 1})
    )
    second = made_of(
        (0.0, {"samples": 0, "steps": 0}), (10.0, {"samples": 300, "steps": 20, "logged{loss}": 3})
    )
    step, found = job_metrics({"worker.0": first, "worker.1": second}, 11.0, 10.0)
    assert step == 20
    assert found["samples_per_second"] == 40.0
    assert found["steps_per_second"] == 1.5
    assert found["loss"] == 2.0


def test_servers_add_up() -> None:
    one = made_of((1.0, {"table_rows{users}": 5}), staleness={0: 1, 2: 3})
    other = made_of((1.0, {"table_rows{users}": 7}), staleness={4: 2})
    _, found = job_metrics({"server.0": one, "server.1": other}, 2.0, 10.0)
    assert found["table_rows/users"] == 12.0
    assert found["staleness"] == pytest.approx(14 / 6)


def test_shares_of_a_step_add_up_to_one() -> None:
    one = made_of(
        (0.0, {"step_wait_seconds": 0.0, "step_forward_seconds": 0.0}),
        (4.0, {"step_wait_seconds": 3.0, "step_forward_seconds": 1.0}),
    )
    _, found = job_metrics({"worker.0": one}, 5.0, 10.0)
    assert (found["step_share/wait"], found["step_share/forward"]) == (0.75, 0.25)


def test_a_process_that_is_gone_does_not_count() -> None:
    lost = made_of((0.0, {"steps": 9, "logged{loss}": 100.0}))
    here = made_of((99.0, {"steps": 3, "logged{loss}": 1.0}))
    step, found = job_metrics({"worker.0": lost, "worker.1": here}, 100.0, 5.0)
    assert (step, found["loss"]) == (3, 1.0)


@pytest.mark.parametrize("other", [math.nan, math.inf, -math.inf])
def test_a_worker_without_a_finite_value_shows_in_the_mean(other: float) -> None:
    one = made_of((1.0, {"logged{loss}": other, "logged{auc}": 0.5}))
    two = made_of((1.0, {"logged{loss}": math.inf}))
    _, found = job_metrics({"worker.0": one, "worker.1": two}, 2.0, 10.0)
    assert not math.isfinite(found["loss"])
    assert found["auc"] == 0.5


def test_an_empty_job_has_no_metrics() -> None:
    assert job_metrics({}, 1.0, 1.0)[0] == 0


# -- files of metrics: recorded, thinned out, followed


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


def test_a_bad_source_ends_no_recorder(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
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


def test_errors_are_logged_once_per_kind(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
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
