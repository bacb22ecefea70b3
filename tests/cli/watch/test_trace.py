# SPDX-License-Identifier: Apache-2.0
"""`fleetlight trace` that is given up leaves no request and no part."""

from pathlib import Path

import pytest

from fleetlight.cli.fleetlight import main
from fleetlight.cli.watch import trace
from fleetlight.observe.tracing.clocks import ClockLead
from fleetlight.observe.tracing.request import (
    TracePart,
    TraceRequest,
    TraceStage,
    request,
    requested,
    write_part,
)


@pytest.fixture(autouse=True)
def running(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "metrics").mkdir()
    names = ["worker 0", "worker 1"], ["server 0"]
    monkeypatch.setattr(trace, "_running", lambda log_dir: names)


def traced(folder: Path, *options: str) -> int:
    return main(["trace", str(folder), "--output", str(folder / "trace.json"), *options])


def files(folder: Path) -> list[Path]:
    return list((folder / "metrics").iterdir())


def write(folder: Path, *names: str) -> None:
    """The parts of these processes."""
    wanted = requested(folder)
    assert wanted is not None
    for name in names:
        write_part(folder, wanted, TracePart(name, 1, []))


def test_a_deadline_withdraws_the_request(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old = TraceRequest("ab", 3)
    request(tmp_path, old)
    write_part(tmp_path, old, TracePart("worker 0", 1, []))
    assert traced(tmp_path, "--deadline_s", "0") != 0
    assert "no trace of server 0 arrived in time" in capsys.readouterr().err
    assert files(tmp_path) == []


def test_ctrl_c_withdraws_the_request_and_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(seconds: float) -> None:
        write(tmp_path, "worker 1", "server 0")
        raise KeyboardInterrupt

    monkeypatch.setattr(trace.time, "sleep", interrupted)
    assert traced(tmp_path) != 0
    assert files(tmp_path) == []


def test_a_trace_that_ends_leaves_its_output_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[TraceStage] = []

    def arrived(seconds: float) -> None:
        last = requested(tmp_path)
        assert last is not None
        asked.append(last.stage)
        names = {
            TraceStage.SERVERS_BEGIN: ["server 0 begun"],
            TraceStage.WORKERS_BEGIN: ["worker 0", "worker 1"],
            TraceStage.OVER: ["server 0"],
        }
        write(tmp_path, *names[last.stage])

    monkeypatch.setattr(trace.time, "sleep", arrived)
    assert traced(tmp_path) == 0
    assert list(dict.fromkeys(asked)) == list(TraceStage)
    assert files(tmp_path) == []
    assert (tmp_path / "trace.json").exists()


def test_each_other_host_has_a_line_on_its_clock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clocks = {"server 0": ClockLead(-2500.0, 100.0)}
    parts = {
        "worker 0": TracePart("worker 0", 1, [], host="a", clocks=clocks),
        "worker 1": TracePart("worker 1", 1, [], host="c"),
        "server 0 begun": TracePart("server 0 begun", 1, []),
        "server 0": TracePart("server 0", 1, [], host="b"),
    }
    monkeypatch.setattr(trace, "take_part", lambda log_dir, wanted, name: parts[name])
    assert traced(tmp_path) == 0
    first, *lines = capsys.readouterr().out.splitlines()
    assert ": 20 steps of 2 workers, and 1 server; open it" in first
    assert lines == [
        "worker 1: the times are those of another host's clock, uncorrected, since no server was "
        "asked from both that host and the host of worker 0",
        "server 0: the clock there is 2.50 ms behind that of worker 0 (within 0.10 ms), which the "
        "trace corrects",
    ]


def test_a_later_trace_keeps_its_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    other = TraceRequest("cd", 3)
    monkeypatch.setattr(trace.time, "sleep", lambda seconds: request(tmp_path, other))
    assert traced(tmp_path) != 0
    assert "another fleetlight trace" in capsys.readouterr().err
    assert requested(tmp_path) == other
