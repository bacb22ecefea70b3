# SPDX-License-Identifier: Apache-2.0
"""Parts of a job: metrics at its end, writes in the background, losses and their scale."""

import threading
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from fleetlight.errors import CheckpointError
from fleetlight.fleet.parts import background
from fleetlight.fleet.parts.background import BackgroundSave
from fleetlight.fleet.parts.loss import LossProbe, scaler_at_work
from fleetlight.fleet.parts.summaries import (
    mean_staleness,
    server_summary,
    servers_summary,
    staleness_warning,
    worker_summary,
)
from fleetlight.ps.messages import ServerMetrics
from fleetlight.ps.plan import ASYNC, DensePlan, InitializerPlan, Plan, RulePlan, TablePlan
from fleetlight.strategy import DistributedStrategy
from fleetlight.torch_compat.optimizers import tell_infinity
from fleetlight.torch_compat.used_graphs import watch_no_longer

MIB = 2**20
TABLE = TablePlan("wide", 2, RulePlan("sgd", {}), InitializerPlan("zeros"), 0, 0)
DENSE = DensePlan("deep", (2,), "float32", 0, 0)


def test_worker_line_has_counts_and_times() -> None:
    metrics = {"steps": 1200.0, "rows_read_ahead": 7.0, "push_wait_seconds": 0.04}
    assert worker_summary(metrics) == "done: steps 1,200, prefetched rows 7, waited 0.0 s"


def test_server_line_has_pushes_and_tables() -> None:
    counted = ServerMetrics(1200, {"wide": 3000, "deep": 5}, {"wide": 3 * MIB, "deep": 0}, {})
    assert server_summary(counted) == (
        "all workers have left after 1,200 pushes; "
        "tables: wide 3,000 rows, 3.0 MiB; deep 5 rows, 0.0 MiB"
    )


def test_metrics_sum_servers_and_average_staleness_over_pushes() -> None:
    one = ServerMetrics(4, {"deep": 1000}, {"deep": MIB}, {0: 3, 2: 1})
    other = ServerMetrics(4, {"deep": 500}, {"deep": MIB}, {0: 1, 4: 1})
    assert servers_summary([one, other]) == (
        "servers: 4 pushes, staleness 1.00 on average, 4 at most; tables: deep 1,500 rows, 2.0 MiB"
    )


def test_metrics_without_pushes_and_tables() -> None:
    line = servers_summary([ServerMetrics(0, {}, {}, {})])
    assert line == "servers: 0 pushes, staleness not counted; no tables"


def warning_for(
    dense: bool = True, tables: bool = True, staleness: int | None = None, **settings: Any
) -> str | None:
    """The warning for gradients with a staleness of 5.5, with two workers."""
    configs = DistributedStrategy(a_sync_configs=settings).a_sync_configs
    plan = Plan(
        mode=ASYNC, worker_num=2, server_num=1, seed=0, tables=[TABLE] if tables else [],
        dense=[DENSE] if dense else [], optimizers=[], staleness=staleness,
        serves_dense=configs.dense == "servers",
    )  # fmt: skip
    usual, late = ServerMetrics(9, {}, {}, {3: 8, 9: 1}), ServerMetrics(9, {}, {}, {4: 1, 6: 3})
    assert staleness_warning([usual], plan, configs) is None
    assert staleness_warning([], plan, configs) is None
    return staleness_warning([usual, late], plan, configs)


@pytest.mark.parametrize(
    ("configs", "cause"),
    [
        ({}, "workers differ in speed; bound the delay with"),
        ({"send_queue_size": 16}, "a_sync_configs.send_queue_size = 16 lets pushes wait"),
        ({"max_merge": 3}, "a_sync_configs.max_merge = 3 lets pushes wait"),
    ],
)
def test_warning_names_the_cause_of_excess_staleness(configs: dict[str, Any], cause: str) -> None:
    warning = warning_for(**configs)
    late = (
        "gradients of rows had a staleness of 5.5 on average, expected at most 4 with 2 workers: "
    )
    assert warning is not None
    assert warning.partition(": ")[0] + ": " == late
    assert cause in warning
    assert ("differ in speed" in warning) is not configs


def test_warning_without_tables_names_dense_parameters() -> None:
    assert str(warning_for(tables=False)).startswith(
        "changes of dense parameters had a staleness of 5.5"
    )


@pytest.mark.parametrize("options", [{"dense": False}, {"staleness": 9}])
def test_no_warning_when_no_bound_applies(options: dict[str, Any]) -> None:
    assert warning_for(**options) is None


def test_no_warning_when_workers_average_dense_gradients() -> None:
    configs = DistributedStrategy(a_sync_configs={"dense": "allreduce"}).a_sync_configs
    plan = Plan(
        mode=ASYNC, worker_num=2, server_num=1, seed=0, tables=[TABLE], dense=[DENSE],
        optimizers=[], serves_dense=False,
    )  # fmt: skip
    assert staleness_warning([ServerMetrics(9, {}, {}, {9: 9})], plan, configs) is None


def test_mean_staleness_is_that_of_all_servers() -> None:
    none = ServerMetrics(4, {}, {}, {})
    assert mean_staleness([none]) is None
    assert mean_staleness([none, ServerMetrics(4, {}, {}, {0: 3, 4: 1})]) == 1.0


# Writes in the background: `finish` waits for them and raises their errors.


def test_finish_without_a_write_returns_at_once() -> None:
    BackgroundSave().finish()


def test_caller_continues_and_finish_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    go, done = threading.Event(), threading.Event()
    messages: list[str] = []

    def warn(text: str, *values: Any) -> None:
        messages.append(text % values)
        go.set()

    monkeypatch.setattr(background, "_WARN_EVERY_S", 0.01)
    monkeypatch.setattr(background.logger, "warning", warn)

    def write() -> None:
        go.wait()
        done.set()

    save = BackgroundSave()
    save.start(write, "save into x")
    assert not done.is_set()
    save.finish()  # only the warning of this call lets the write continue
    assert done.is_set()
    assert messages[0].startswith("waiting for the save into x for ")


def fail() -> None:
    raise OSError("no space left")


def test_failure_is_logged_at_once_and_raised_once(monkeypatch: pytest.MonkeyPatch) -> None:
    messages: list[str] = []
    monkeypatch.setattr(
        background.logger, "error", lambda text, *values: messages.append(text % values)
    )
    save = BackgroundSave()
    save.start(fail, "save into x at step 3")
    with pytest.raises(CheckpointError, match=r"save into x at step 3 failed .*: no space left"):
        save.finish()
    assert "save into x at step 3 failed" in messages[0]
    save.finish()
    save.start(lambda: None, "next save")
    save.finish()


# The loss of the last backward is kept without its graph.


@pytest.fixture
def seen() -> Iterator[LossProbe]:
    seen = LossProbe()
    yield seen
    seen.close()
    watch_no_longer()


def test_last_loss_is_kept_without_its_graph(seen: LossProbe) -> None:
    x = torch.ones(3, requires_grad=True)
    for factor in (1.0, 2.0):
        (x.sum() * factor).backward()
    assert seen.value is not None
    assert (float(seen.value), seen.value.requires_grad, seen.number) == (6.0, False, 2)
    assert x.grad is not None
    assert x.grad.tolist() == [3.0] * 3


def test_tensor_of_several_numbers_is_no_loss(seen: LossProbe) -> None:
    x = torch.ones(3, requires_grad=True)
    (2 * x).backward(torch.ones(3), retain_graph=True)
    assert (seen.value, seen.number) == (None, 0)
    assert x.grad is not None


def test_closed_watcher_records_no_loss(seen: LossProbe) -> None:
    seen.close()
    seen.close()
    torch.ones(1, requires_grad=True).sum().backward()
    assert (seen.value, seen.number) == (None, 0)


# Torch's loss scaler: found while it steps, and informed of an infinity of another worker.


def scaled(optimizer: torch.optim.Optimizer) -> torch.amp.GradScaler:
    """A scaler with gradients to step."""
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    parameter = optimizer.param_groups[0]["params"][0]
    scaler.scale(parameter.sum()).backward()
    return scaler


def sgd() -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1)


def test_scaler_is_found_only_from_a_step_hook() -> None:
    optimizer = sgd()
    torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    found: list[Any] = []
    optimizer.register_step_pre_hook(lambda *_: found.append(scaler_at_work()))
    scaler = scaled(optimizer)
    scaler.step(optimizer)
    optimizer.step()
    assert found == [scaler, None]
    assert scaler_at_work() is None


def test_search_keeps_no_batch_of_the_caller_alive() -> None:
    class Batch:
        """An object that a script holds during a step."""

    optimizer = sgd()
    optimizer.register_step_pre_hook(lambda *_: found.append(scaler_at_work()))
    scaler = scaled(optimizer)
    for step in (lambda: scaler.step(optimizer), optimizer.step):
        found: list[Any] = []
        batch = Batch()
        left = weakref.ref(batch)
        step()
        del batch
        # freed before this function ends
        assert left() is None
        assert len(found) == 1


def test_scaler_informed_of_an_infinity_backs_off() -> None:
    optimizer = sgd()
    scaler = scaled(optimizer)
    scaler.step(optimizer)
    tell_infinity(scaler, optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0
    # the scaler keeps nothing for an optimizer it has not stepped
    tell_infinity(scaler, sgd())
    scaled(optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0
