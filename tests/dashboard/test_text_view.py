# SPDX-License-Identifier: Apache-2.0
"""`fleetlight top`: the essentials of a job as text, wide and narrow."""

import json
import math
import re
import shutil
import subprocess
import sys
import time
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.dashboard.simulated import SimulatedJob

import fleetlight.dashboard
from fleetlight.cli.fleetlight import main
from fleetlight.dashboard import log_files
from fleetlight.dashboard.feed import JobFeed
from fleetlight.dashboard.job_files import JobFiles
from fleetlight.dashboard.log_files import log_names, read_log
from fleetlight.dashboard.prometheus import PREFIX, RESTARTS, UP, metrics_text
from fleetlight.dashboard.text_view import text_of
from fleetlight.dashboard.view.facts import ProcessReading, ProcessState
from fleetlight.dashboard.view.job_view import JobView
from fleetlight.observe.telemetry.catalogue import METRICS, MetricKind
from fleetlight.observe.telemetry.history import History
from fleetlight.observe.telemetry.recorder import EventFile, MetricRecorder, ThinnedFile
from fleetlight.observe.telemetry.registry import Registry
from fleetlight.observe.telemetry.snapshot import FOLDER, Snapshot, labelled, line_of, snapshot_file


def record(folder: Path, kind: str, index: int, at: float, **values: float) -> None:
    file = ThinnedFile(folder / FOLDER / snapshot_file(kind, index))
    counts = {"staleness": {2: 4}} if kind == "server" else {}
    found = {key.replace("__", "{") + "}" * ("__" in key): v for key, v in values.items()}
    file.append(line_of(Snapshot(at, 5, found, counts)))


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """A worker, a server and an event."""
    now = time.time()
    for ago, steps in ((4.0, 0.0), (0.0, 40.0)):
        record(
            tmp_path,
            "worker",
            0,
            now - ago,
            steps=steps,
            samples=10 * steps,
            step_wait_seconds=0.03 * steps,
            step_forward_seconds=0.07 * steps,
            resident_bytes=2.0**28,
            logged__loss=0.25,
        )
        record(tmp_path, "server", 0, now - ago, table_rows__users=10 * steps, applied_pushes=steps)
    EventFile(tmp_path, "fleetrun.h.1", "fleetrun").add("restart", "restart 1, pid 9", "worker 0")
    return tmp_path


def shown(folder: Path, columns: int | None, *, colour: bool = False) -> str:
    history, view = History(folder), JobView()
    history.poll()
    view.update(history, JobFiles(folder).read(), time.time())
    return text_of(view.whole(), columns, colour, clock=lambda at: "12:00:00")


def test_what_matters_is_shown(job: Path) -> None:
    text = shown(job, 120)
    [worker] = [line for line in text.splitlines() if line.startswith("worker 0")]
    assert " ".join(worker.split()) == "worker 0 running 40 10.0 100.0 ms 30% forward 256 MiB"
    assert "100 samples/s" in text
    assert "staleness 2.0" in text
    assert "table users: 400 rows" in text
    assert "12:00:00 worker 0: restart 1, pid 9" in text
    assert "\x1b" not in text


def test_a_value_that_is_no_number_is_named(job: Path) -> None:
    assert "loss 0.25" in shown(job, 120)
    record(job, "worker", 1, time.time(), logged__loss=math.nan, logged__auc=0.5)
    assert "loss NaN or infinite" in shown(job, 120)


def test_a_narrow_terminal_breaks_no_word(job: Path) -> None:
    assert max(map(len, shown(job, 40).splitlines())) <= 40


def test_a_terminal_gets_colours(job: Path) -> None:
    assert "\x1b[2m" in shown(job, 120, colour=True)


def process(name: str, **more: Any) -> dict[str, Any]:
    kind = name.split()[0]
    return {"name": name, "kind": kind, "state": "running", "restarts": 0, "step": 9} | more


def many(workers: int, tables: int = 1) -> dict[str, Any]:
    """What the page shows of a job with a slow worker, 3, and a failed one, 5."""
    processes = [process("server 0")]
    processes += [process(f"worker {n}", step_s=0.1 + 0.001 * n) for n in range(workers)]
    processes[4]["step_s"] = 2.0
    processes[6]["state"] = "failed"
    table = {"rows": 10, "growth": 0, "servers": {"server 0": 2**20}}
    return {
        "folder": "log",
        "description": {"mode": "async"},
        "over": False,
        "code": None,
        "processes": processes,
        "staleness": {"mean": None},
        "hit": None,
        "skipped": 0,
        "lines": {"logged": {}},
        "parts": ["wait"],
        "straggler": {"name": "worker 3", "part": "data"},
        "tables": [{"name": f"t{n}", **table} for n in range(tables)],
        "events": [{"at": 0.0, "who": "fleetrun", "text": f"event {n}"} for n in range(9)],
    }


def lines_of(whole: dict[str, Any], columns: int, lines: int) -> list[str]:
    return text_of(whole, columns, False, lambda at: "12:00:00", lines=lines).split("\n")


def test_few_lines_leave_out_fast_workers() -> None:
    found = lines_of(many(64), 120, 24)
    assert len(found) == 24
    assert found[0] == "log: async"
    shown = [line[:9].strip() for line in found if re.match(r"(worker|server) \d", line)]
    assert shown == ["server 0", "worker 3", "worker 5", *[f"worker {n}" for n in range(57, 64)]]
    assert "and 55 more" in found
    assert "slowest: worker 3, mostly in data" in found
    assert found[-1] == "12:00:00 fleetrun: event 8"


def test_fewer_lines_leave_out_old_events() -> None:
    found = lines_of(many(64, tables=9), 120, 18)
    assert len(found) <= 18
    events = [line for line in found if "event" in line]
    assert events == [f"12:00:00 fleetrun: event {n}" for n in (6, 7, 8)]
    assert "and 6 more" in found


@pytest.mark.parametrize("lines", [1, 3, 6, 10, 24, 200])
@pytest.mark.parametrize("columns", [20, 40, 80, 120])
def test_no_more_lines_than_the_terminal_has(columns: int, lines: int) -> None:
    whole = many(64)
    whole["folder"] = "a long name of a folder" if lines > 3 else "log"
    whole["events"][-1]["text"] = "word " * 60
    found = lines_of(whole, columns, lines)
    assert sum(max(1, -(-len(line) // columns)) for line in found) <= lines


def test_enough_lines_show_everything() -> None:
    whole = many(64)
    shown = "\n".join(lines_of(whole, 120, 200))
    assert shown == text_of(whole, 120, False, lambda at: "12:00:00")
    assert "more" not in shown


def test_ctrl_c_restores_the_terminal_and_leaves_the_last_state(
    job: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(seconds: float) -> None:
        raise KeyboardInterrupt

    for name, value in {"COLUMNS": "120", "LINES": "7", "NO_COLOR": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setattr("fleetlight.cli.watch.top.time.sleep", interrupted)
    assert main(["top", str(job)]) == 0
    before, alternate, rest = capsys.readouterr().out.partition("\x1b[?1049h")
    screen, normal, after = rest.partition("\x1b[?1049l")
    assert (before, bool(alternate), bool(normal)) == ("", True, True)
    assert screen.count("\n") < 7
    assert "server 0" in screen
    assert "restart 1, pid 9" in after
    assert "\x1b" not in after


def test_a_pipe_gets_it_once(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", str(job)]) == 0
    assert "worker 0" in capsys.readouterr().out


def test_another_folder_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", str(tmp_path)]) != 0
    assert "expected the log folder of a job" in capsys.readouterr().err


# -- the files of the page: small, complete, and without anything from elsewhere


PAGE = Path(fleetlight.dashboard.__file__).with_name("page")
FILES = {path.name: path.read_text(encoding="utf-8") for path in PAGE.iterdir()}
OWN = {name: text for name, text in FILES.items() if not name.startswith("uplot.")}


def test_the_page_is_small() -> None:
    assert sum(len(text.encode()) for text in FILES.values()) < 300_000


def test_everything_is_in_the_folder() -> None:
    linked = set(re.findall(r'(?:src|href)="([^"#]+)"', FILES["index.html"]))
    imported = {name for text in FILES.values() for name in re.findall(r'from "\./([^"]+)"', text)}
    assert linked | imported <= FILES.keys()
    assert FILES.keys() - {"index.html", "uplot.LICENSE"} <= linked | imported
    for name, text in OWN.items():
        assert set(re.findall(r"\w+://[^\s\"'`]+", text)) <= {"http://www.w3.org/2000/svg"}, name


def test_the_policy_of_the_page_allows_all_of_it() -> None:
    assert not re.search(r"<script(?![^>]*\bsrc=)|\son\w+=|\sstyle=", FILES["index.html"])
    for text in OWN.values():
        assert not re.search(r"innerHTML|insertAdjacentHTML|document\.write|\beval\(", text)


def test_scripts_use_elements_of_the_page() -> None:
    ids = set(re.findall(r'\bid="([^"]+)"', FILES["index.html"]))
    used = {
        name for text in OWN.values() for name in re.findall(r'(?:byId|showChart)\("([^"]+)"', text)
    }
    assert used
    assert used <= ids


def test_the_vendored_library_has_its_licence() -> None:
    assert "MIT License" in FILES["uplot.LICENSE"]
    assert "uPlot (v1.6.32)" in FILES["uplot.js"][:200]


# -- what the log folder says of a job besides metrics


def test_processes_of_other_machines_have_a_host(tmp_path: Path) -> None:
    SimulatedJob(tmp_path, workers=1, servers=1).launcher()
    endpoints = "job x\nserver 0 127.0.0.1:1\nworker 0 127.0.0.1:2\nworker 1 10.0.0.2:3\n"
    (tmp_path / "endpoints.log").write_text(endpoints)
    found = JobFiles(tmp_path).read()
    assert found.processes["worker 1"].host == "10.0.0.2"
    assert found.processes["worker 1"].state is ProcessState.UNKNOWN
    assert found.processes["worker 0"].state is ProcessState.RUNNING
    assert list(found.free_bytes) == ["127.0.0.1"]


@pytest.mark.parametrize(
    ("status", "state", "detail"),
    [
        (0, ProcessState.ENDED, "exit code 0"),
        (3, ProcessState.FAILED, "exit code 3"),
        (-9, ProcessState.FAILED, "killed by SIGKILL"),
        (-77, ProcessState.FAILED, "killed by signal 77"),
    ],
)
def test_how_a_process_ended(tmp_path: Path, status: int, state: ProcessState, detail: str) -> None:
    job = SimulatedJob(tmp_path, workers=1, servers=0)
    job.statuses["worker 0"] = status
    job.launcher()
    found = JobFiles(tmp_path).read().processes["worker 0"]
    assert (found.state, found.detail) == (state, detail)


def test_the_job_describes_itself_later(tmp_path: Path) -> None:
    (tmp_path / "metrics").mkdir()
    files = JobFiles(tmp_path)
    assert files.read().description == {"picture": False}
    path = tmp_path / "metrics" / "job.json"
    path.write_text(json.dumps({"explain": "a_sync", "mode": "async", "svg": "<svg/>", "x": 1}))
    assert files.read().description == {"explain": "a_sync", "mode": "async", "picture": True}
    assert files.picture == "<svg/>"
    path.write_text("not json, and half writ")
    assert files.read().description == {"picture": False}


def test_a_damaged_record_is_none(tmp_path: Path) -> None:
    (tmp_path / "launcher.127.0.0.1.1.json").write_text("{")
    found = JobFiles(tmp_path).read()
    assert (found.processes, found.is_over) == ({}, False)


# -- logs of a job: only its own, and never more than a maximum


def _lines(folder: Path, name: str, find: str = "") -> list[str]:
    found = read_log(folder, name, find)
    assert found is not None
    lines: list[str] = found["lines"]
    return lines


def test_workers_come_first_by_number(tmp_path: Path) -> None:
    for name in ("serverlog.0", "workerlog.10", "workerlog.2", "endpoints.log", "workerlog.x"):
        (tmp_path / name).touch()
    assert log_names(tmp_path) == ["workerlog.2", "workerlog.10", "serverlog.0"]


def test_the_last_lines(tmp_path: Path) -> None:
    (tmp_path / "workerlog.0").write_text("".join(f"line {n}\n" for n in range(2000)) + "half")
    lines = _lines(tmp_path, "workerlog.0")
    assert (len(lines), lines[-2:]) == (500, ["line 1999", "half"])


def test_a_search_ignores_case_and_finds_old_lines(tmp_path: Path) -> None:
    text = "ValueError: first\n" + "nothing\n" * 300_000 + "valueerror: last\n"
    (tmp_path / "workerlog.0").write_text(text)
    assert _lines(tmp_path, "workerlog.0", "VALUEERROR") == [
        "ValueError: first",
        "valueerror: last",
    ]
    assert "ValueError: first" not in _lines(tmp_path, "workerlog.0")


@pytest.mark.parametrize("find", ["ÄRGER", "ärger", "STRASSE"])
def test_a_search_ignores_the_case_of_all_letters(tmp_path: Path, find: str) -> None:
    (tmp_path / "workerlog.0").write_text("Ärger in der Straße\nnothing\n", encoding="utf-8")
    assert _lines(tmp_path, "workerlog.0", find) == ["Ärger in der Straße"]


def test_a_large_log_is_searched_at_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_files, "_SEARCHED_BYTES", 1000)
    (tmp_path / "workerlog.0").write_text("old error\n" + "x" * 80 + "\n" * 990 + "new error\n")
    assert _lines(tmp_path, "workerlog.0", "error") == ["new error"]


def test_a_line_without_end_is_cut(tmp_path: Path) -> None:
    (tmp_path / "workerlog.0").write_bytes(b"a" * (3 << 20) + b"\nend\n")
    assert _lines(tmp_path, "workerlog.0", "end") == ["end"]
    assert max(map(len, _lines(tmp_path, "workerlog.0", "a"))) == 2000


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    (tmp_path / "workerlog.0").write_bytes(b"\xff\xfe loss\n")
    assert _lines(tmp_path, "workerlog.0") == ["\ufffd\ufffd loss"]


@pytest.mark.parametrize("name", ["../outside", "other.txt", "workerlog.0/..", "", "workerlog."])
def test_no_file_but_a_log(tmp_path: Path, name: str) -> None:
    (tmp_path / "other.txt").write_text("secret")
    assert read_log(tmp_path, name) is None


def test_a_link_is_no_log(tmp_path: Path) -> None:
    (tmp_path / "other.txt").write_text("secret")
    (tmp_path / "workerlog.0").symlink_to(tmp_path / "other.txt")
    assert read_log(tmp_path, "workerlog.0") is None


# -- the text that Prometheus reads, and the dashboard of Grafana that asks for its names


def _reading(index: int = 0, *, is_up: bool = True, **values: float) -> ProcessReading:
    return ProcessReading(
        kind="worker", index=index, is_up=is_up, restarts=2, values=values, counts={}
    )


def _samples(readings: list[ProcessReading]) -> dict[tuple[str, ...], float]:
    """The samples as Prometheus would parse them: name and values of labels."""
    text = metrics_text(lambda: readings).decode()
    return {
        (sample.name, *(value for _, value in sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def _every_metric() -> ProcessReading:
    values = {
        labelled(name, "one") if metric.label else name: 1.0
        for name, metric in METRICS.items()
        if metric.kind is not MetricKind.COUNTS
    }
    counts = {name: {0: 1} for name, one in METRICS.items() if one.kind is MetricKind.COUNTS}
    return ProcessReading(
        kind="worker", index=0, is_up=True, restarts=0, values=values, counts=counts
    )


def test_each_metric_of_the_catalogue_is_exported() -> None:
    names = {name for name, *_ in _samples([_every_metric()])}
    for metric in METRICS.values():
        suffix = {MetricKind.COUNTER: "_total", MetricKind.COUNTS: "_bucket"}.get(metric.kind, "")
        assert f"{PREFIX}{metric.name}{suffix}" in names


def test_labels_are_role_index_and_that_of_the_metric() -> None:
    found = _samples([_reading(3, **{labelled("table_rows", 'a "b"\\c'): 5.0, "steps": 7.0})])
    assert found[("fleetlight_table_rows", "3", "worker", 'a "b"\\c')] == 5.0
    assert found[("fleetlight_steps_total", "3", "worker")] == 7.0
    assert found[("fleetlight_restarts_total", "3", "worker")] == 2.0


def test_a_process_that_is_down_has_only_that() -> None:
    found = _samples([_reading(0, is_up=False, steps=7.0), _reading(1, steps=8.0)])
    assert found[("fleetlight_up", "0", "worker")] == 0.0
    assert found[("fleetlight_restarts_total", "0", "worker")] == 2.0
    names = {name for name, index, *_ in found if index == "0" and not name.endswith("_created")}
    assert names == {"fleetlight_up", "fleetlight_restarts_total"}
    assert found[("fleetlight_steps_total", "1", "worker")] == 8.0


def test_values_that_are_not_finite_are_passed_on(tmp_path: Path) -> None:
    registry = Registry()
    registry.add(lambda: {"steps": 7})
    registry.logged.add({"loss": math.nan, "norm": math.inf})
    MetricRecorder(tmp_path, "worker", 0, registry).close()
    found = _samples(JobFeed(tmp_path).newest())
    assert found[("fleetlight_steps_total", "0", "worker")] == 7.0
    assert math.isnan(found[("fleetlight_logged", "0", "loss", "worker")])
    assert found[("fleetlight_logged", "0", "norm", "worker")] == math.inf


def test_counts_are_a_histogram() -> None:
    counts = {"staleness": {0: 5, 3: 2, 100: 1}}
    reading = ProcessReading(
        kind="server", index=0, is_up=True, restarts=0, values={}, counts=counts
    )
    found = _samples([reading])
    assert found[("fleetlight_staleness_bucket", "0", "2.0", "server")] == 5.0
    assert found[("fleetlight_staleness_bucket", "0", "4.0", "server")] == 7.0
    assert found[("fleetlight_staleness_bucket", "0", "+Inf", "server")] == 8.0
    assert found[("fleetlight_staleness_sum", "0", "server")] == 106.0


def test_workers_that_invent_labels_have_a_maximum() -> None:
    readings = [
        _reading(index, **{labelled("logged", f"{index}-{n}"): 1.0 for n in range(200)})
        for index in range(5)
    ]
    found = [name for name in _samples(readings) if name[0] == "fleetlight_logged"]
    assert len(found) == 256


def _grafana() -> dict[str, Any]:
    text = resources.files("fleetlight.dashboard").joinpath("grafana.json").read_text("utf-8")
    board: dict[str, Any] = json.loads(text)
    return board


def test_grafana_asks_for_names_that_are_exported() -> None:
    exported = {name for name, *_ in _samples([_every_metric()])}
    board = _grafana()
    queries = [target["expr"] for panel in board["panels"] for target in panel.get("targets", ())]
    asked = {name for query in queries for name in re.findall(r"\bfleetlight_\w+", query)}
    assert len(asked) > 25
    assert asked <= exported
    assert {f"{PREFIX}{UP}", f"{PREFIX}{RESTARTS}_total"} <= asked


def test_panels_of_grafana_have_places_of_their_own() -> None:
    panels = _grafana()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    places = {
        (x, y)
        for panel in panels
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    }
    assert len(places) == sum(panel["gridPos"]["w"] * panel["gridPos"]["h"] for panel in panels)


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs apt-get install prometheus")
def test_promtool_finds_no_fault() -> None:
    done = subprocess.run(
        ["promtool", "check", "metrics", "--extended"],
        input=metrics_text(lambda: [_every_metric()]),
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()
