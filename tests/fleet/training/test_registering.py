# SPDX-License-Identifier: Apache-2.0
"""Two strategies in one job: a log line names the settings that differ."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tests.workers import run_processes
from torch import nn

import fleetlight as fleet
from fleetlight.errors import PlanError
from fleetlight.fleet.job import current
from fleetlight.observe.log import logger
from fleetlight.strategy import DistributedStrategy, differences

pytestmark = pytest.mark.multiprocess


def test_differences_are_named_with_both_values() -> None:
    one = DistributedStrategy(amp=True, a_sync_configs={"k_steps": 4})
    other = DistributedStrategy(amp=True, seed=3)
    assert differences(one, other) == ["a_sync_configs.k_steps = 4, now 0", "seed = 0, now 3"]
    assert differences(one, one) == []


def lines_of(given: list[dict[str, Any] | None]) -> Any:
    """The log lines for the strategies given to `fleet.init` and to each optimizer."""
    lines: list[str] = []
    logger.addFilter(lambda record: lines.append(record.getMessage()) or True)
    first, *others = [None if one is None else DistributedStrategy(**one) for one in given]
    fleet.init(is_collective=True, strategy=first)
    model = fleet.distributed_model(nn.Linear(1, 1))
    for strategy in others:
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        fleet.distributed_optimizer(optimizer, strategy)
    fleet.stop_worker()
    told = ("its strategy replaces", "takes effect only when given to")
    return [line for line in lines if any(words in line for words in told)]


def lines(*given: dict[str, Any] | None) -> list[str]:
    [found] = run_processes(lines_of, [(list(given),)])
    return list(found)


def test_different_second_strategy_is_logged() -> None:
    [line] = lines({"seed": 1}, {"seed": 2, "amp": True})
    assert "the one given to fleet.init, from which it differs" in line
    assert "amp = False, now True, seed = 1, now 2; give one strategy only" in line


def test_equal_or_single_strategies_are_not_logged() -> None:
    assert lines({"amp": True}, {"amp": True}) == []
    assert lines(None, {"amp": True}) == []
    assert lines({"amp": True}, None) == []


def test_different_strategies_of_two_optimizers_are_logged() -> None:
    [line] = lines(None, {"amp": True}, {"amp": True}, {})
    assert "the one given to an earlier fleet.distributed_optimizer" in line


def test_sinks_that_are_too_late_are_logged() -> None:
    [line] = lines(None, {"sinks": "tensorboard"})
    assert line.startswith("strategy.sinks = 'tensorboard' has no effect: it takes effect only")
    assert line.endswith("the job has no sinks")


@pytest.fixture
def alone() -> Iterator[None]:
    fleet.init()
    yield
    fleet.reset()


@pytest.mark.usefixtures("alone")
def test_repeated_attach_registers_once() -> None:
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), 0.1)
    scheduler, scaler = torch.optim.lr_scheduler.StepLR(optimizer, 2), torch.amp.GradScaler("cpu")
    for _ in range(2):
        fleet.attach(scheduler=scheduler, scaler=scaler)
    assert current().schedulers.of([optimizer]) == [scheduler]
    assert current().scalers == [scaler]


@pytest.mark.usefixtures("alone")
def test_attach_checks_its_arguments() -> None:
    with pytest.raises(PlanError, match="got a SGD as scheduler, expected a torch"):
        fleet.attach(scheduler=torch.optim.SGD(nn.Linear(1, 1).parameters(), 0.1))  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="got nothing, expected scheduler="):
        fleet.attach()
