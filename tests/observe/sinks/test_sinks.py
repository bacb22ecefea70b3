# SPDX-License-Identifier: Apache-2.0
"""Metrics arrive in TensorBoard, MLflow and Weights & Biases, each with its own package."""

import importlib.util
import itertools
import math
import socket
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from pages.printed.blocks import blocks_of

from fleetlight.errors import ConfigError
from fleetlight.observe.sinks.feeder import SinkFeeder
from fleetlight.observe.sinks.services import openers
from fleetlight.observe.telemetry.recorder import MetricRecorder
from fleetlight.observe.telemetry.registry import Registry


def needs(package: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(importlib.util.find_spec(package) is None, reason=f"needs {package}")


def written(text: str) -> None:
    """Two steps through a sink."""
    [opener] = openers(text).values()
    sink = opener()
    sink.write(1, {"loss": 0.5, "table_rows/users": 10.0}, at=1000.0)
    sink.write(2, {"loss": 0.25, "table_rows/users": 20.0}, at=1001.0)
    sink.close()


@needs("tensorboard")
def test_tensorboard_reads_the_folder(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    written(f"tensorboard:{tmp_path}")
    found = EventAccumulator(str(tmp_path))
    found.Reload()
    assert [(one.step, one.value, one.wall_time) for one in found.Scalars("loss")] == [
        (1, 0.5, 1000.0),
        (2, 0.25, 1001.0),
    ]
    assert found.Scalars("table_rows/users")[1].value == 20.0


@needs("mlflow")
def test_mlflow_has_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import mlflow

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    written(f"mlflow:file://{tmp_path}/mlruns")
    client = mlflow.MlflowClient(f"file://{tmp_path}/mlruns")
    [run] = client.search_runs([one.experiment_id for one in client.search_experiments()])
    history = client.get_metric_history(run.info.run_id, "loss")
    assert [(one.step, one.value) for one in history] == [(1, 0.5), (2, 0.25)]
    assert run.info.status == "FINISHED"


def test_a_class_of_the_page_gets_metrics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = Path(__file__).resolve().parents[3] / "docs" / "metrics.md"
    [program] = [one.code for one in blocks_of(page.read_text()) if one.file == "my_sinks.py"]
    (tmp_path / "my_sinks.py").write_text(program)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    written("python:my_sinks.CsvSink")
    lines = (tmp_path / "metrics.csv").read_text().splitlines()
    assert lines[0] == "1,loss,0.5"
    assert len(lines) == 4
    for name in ("my_sinks.Other", "no_such_module.Sink", "Sink"):
        with pytest.raises(ConfigError, match=f"python:{name} cannot be imported"):
            openers(f"python:{name}")


@needs("wandb")
@pytest.mark.slow
def test_wandb_has_a_run_on_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    written("wandb:clicks")
    [run] = tmp_path.glob("wandb/offline-run-*/*.wandb")
    assert run.stat().st_size > 0


@pytest.mark.parametrize(
    ("text", "expected"), [("tensorbord:runs", "tensorboard"), ("csv:x", "got 'csv:x'")]
)
def test_an_unknown_service_is_refused(text: str, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        openers(text)


@pytest.mark.parametrize("kind", ["mlflow", "wandb", "tensorboard"])
def test_a_missing_package_is_named(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("mlflow", "wandb", "torch.utils.tensorboard"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match=rf"pip install \"fleetlight\[{kind}\]\""):
        openers(kind)


class Kept:
    """A sink in memory."""

    def __init__(self, *, fails: bool = False) -> None:
        self.fails, self.is_closed = fails, False
        self.lines: list[tuple[int, dict[str, float]]] = []

    def write(self, step: int, values: Mapping[str, float], at: float) -> None:
        if self.fails:
            raise OSError("no route to host")
        self.lines.append((step, dict(values)))

    def close(self) -> None:
        self.is_closed = True


def fed(sinks: list[Kept], log_dir: Path | None, registry: Registry) -> SinkFeeder:
    openers = {f"sink {i}": lambda sink=sink: sink for i, sink in enumerate(sinks)}
    return SinkFeeder(openers, registry, log_dir, every_s=3600)


def test_one_process_alone_feeds_its_own_metrics() -> None:
    registry, kept = Registry(), Kept()
    registry.add(lambda: {"steps": 7})
    registry.logged.add({"loss": 0.5, "bad": float("nan")})
    feeder = fed([kept], None, registry)
    feeder.close()
    feeder.close()
    [(step, values)] = kept.lines
    assert (step, values["loss"]) == (7, 0.5)
    assert "bad" not in values
    assert kept.is_closed


def test_the_metrics_of_all_workers_arrive(tmp_path: Path) -> None:
    kept = Kept()
    for index, loss in enumerate((1.0, 3.0)):
        registry = Registry()
        registry.logged.add({"loss": loss})
        MetricRecorder(tmp_path, "worker", index, registry).close()
    fed([kept], tmp_path, Registry()).close()
    assert kept.lines[-1][1]["loss"] == 2.0


def test_values_that_are_not_finite_stop_no_sink(tmp_path: Path) -> None:
    kept = Kept()
    for index, loss in enumerate((math.inf, -math.inf)):
        registry = Registry()
        registry.logged.add({"loss": loss, "auc": 0.5})
        MetricRecorder(tmp_path, "worker", index, registry).close()
    fed([kept], tmp_path, Registry()).close()
    assert kept.lines[-1][1]["auc"] == 0.5
    assert "loss" not in kept.lines[-1][1]


def test_a_service_that_fails_stops_no_other(caplog: pytest.LogCaptureFixture) -> None:
    broken, kept = Kept(fails=True), Kept()
    feeder = fed([broken, kept], None, Registry())
    for _ in range(8):
        feeder.feed()
    feeder.close()
    assert len(kept.lines) == 9
    assert caplog.messages == [
        "sink 0 does not take metrics, and is tried again: no route to host",
        "sink 0 gets no more metrics after 5 failures: no route to host",
    ]
    assert not broken.is_closed


def test_a_service_that_comes_back_gets_metrics_again() -> None:
    kept: Any = Kept(fails=True)
    feeder = fed([kept], None, Registry())
    for _ in range(4):
        feeder.feed()
    kept.fails = False
    feeder.feed()
    kept.fails = True
    feeder.feed()
    kept.fails = False
    feeder.close()
    assert len(kept.lines) == 2


def test_a_service_that_cannot_be_opened_is_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    kept, attempts = Kept(), itertools.count()

    def opener() -> Kept:
        if next(attempts) < 2:
            raise OSError("no route to host")
        return kept

    registry = Registry()
    registry.add(lambda: {"steps": 7})
    feeder = SinkFeeder({"mlflow": opener}, registry, None, every_s=3600)
    feeder.feed()
    feeder.feed()
    feeder.close()
    assert [step for step, _ in kept.lines] == [7, 7]
    assert caplog.messages == ["mlflow does not take metrics, and is tried again: no route to host"]
    assert kept.is_closed


def test_a_service_that_hangs_delays_the_end_by_no_more_than_asked(
    caplog: pytest.LogCaptureFixture,
) -> None:
    opens = threading.Event()

    class Hanging(Kept):
        def write(self, step: int, values: Mapping[str, float], at: float) -> None:
            assert opens.wait(60.0)

    SinkFeeder({"wandb": Hanging}, Registry(), None, every_s=3600, close_s=0.05).close()
    opens.set()
    assert "the last metrics did not reach wandb within 0.05 s" in caplog.text


@pytest.mark.parametrize("method", ["__init__", "close"])
def test_a_service_that_hangs_delays_neither_start_nor_end(
    method: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    opens, hangs, hung = threading.Event(), threading.Event(), []

    class Hanging(Kept):
        pass

    def hang(self: Hanging) -> None:
        hung.append(threading.current_thread())
        hangs.set()
        assert opens.wait(20.0)

    monkeypatch.setattr(Hanging, method, hang)
    openers = {"tensorboard": Kept, "wandb": Hanging}
    SinkFeeder(openers, Registry(), None, every_s=3600, open_s=0.0, close_s=0.05).close()
    assert hangs.wait(20.0)
    assert threading.main_thread() not in hung
    assert "did not reach" in caplog.text
    assert "wandb within 0.05 s" in caplog.text
    opens.set()


@needs("mlflow")
def test_metrics_join_the_run_of_a_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import mlflow

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    uri = f"file://{tmp_path}/mlruns"
    mlflow.set_tracking_uri(uri)
    registry = Registry()
    registry.logged.add({"loss": 0.5})
    with mlflow.start_run() as run:
        SinkFeeder(openers(f"mlflow:{uri}"), registry, None, every_s=3600).close()
        assert mlflow.active_run() is not None
    [loss] = mlflow.MlflowClient(uri).get_metric_history(run.info.run_id, "loss")
    assert loss.value == 0.5


@needs("mlflow")
@pytest.mark.slow
def test_a_job_starts_without_its_server_of_mlflow(caplog: pytest.LogCaptureFixture) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        one = f"mlflow:http://127.0.0.1:{closed.getsockname()[1]}"
        SinkFeeder(openers(one), Registry(), None, every_s=3600).close()
    assert f"{one} does not take metrics" in caplog.text
