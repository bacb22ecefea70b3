# SPDX-License-Identifier: Apache-2.0
"""The warning about gradients that backward did not reduce names the cause."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.workers import run_workers
from torch import Tensor, nn

import fleetlight as fleet
from fleetlight.collective.data_parallel.late_gradients import Cause, Forward, LateGradients
from fleetlight.observe.log import logger

SGD = torch.optim.SGD
X = torch.ones(4, 3)
Step = Callable[[Any], None]


def whole(model: Any) -> None:
    model(X).sum().backward()


def in_eval(model: Any) -> None:
    model.eval()
    whole(model)
    model.train()


def under_no_sync(model: Any) -> None:
    with fleet.no_sync():
        whole(model)


def in_parts(model: Any) -> None:
    model[1](model[0](X)).sum().backward()


def twice(model: Any) -> None:
    loss = model(X).sum()
    loss.backward(retain_graph=True)
    loss.backward()


def by_hand(model: Any) -> None:
    found: tuple[Tensor, ...] = torch.autograd.grad(model(X).sum(), list(model.parameters()))
    for parameter, gradient in zip(model.parameters(), found, strict=True):
        parameter.grad = gradient


def changed(model: Any) -> None:
    whole(model)
    model[0].weight.requires_grad_(False)


def warnings_of(*steps: Step) -> list[str]:
    """The warnings of a worker that makes these steps."""
    lines: list[str] = []
    logger.addFilter(lambda record: lines.append(record.getMessage()) or True)
    model = fleet.distributed_model(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2)))
    optimizer = fleet.distributed_optimizer(SGD(model.parameters(), 0.1))
    for step in steps:
        optimizer.zero_grad()
        step(model)
        optimizer.step()
    return [line for line in lines if "not reduced during backward" in line]


def with_closure() -> tuple[list[str], list[float]]:
    """Steps as Lightning makes them: backward runs inside the step, by submodules."""
    lines: list[str] = []
    logger.addFilter(lambda record: lines.append(record.getMessage()) or True)
    torch.manual_seed(0)
    model = fleet.distributed_model(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2)))
    optimizer = fleet.distributed_optimizer(SGD(model.parameters(), 0.1))

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = model[1](model[0](X * (1 + fleet.worker_index()))).square().sum()
        loss.backward()
        return loss

    for _ in range(3):
        optimizer.step(closure)
    warned = [line for line in lines if "not reduced during backward" in line]
    return warned, model[0].weight.flatten().tolist()


@pytest.mark.multiprocess
def test_gradients_of_a_closure_are_reduced_with_a_warning() -> None:
    (lines, zero), (_, one) = run_workers(with_closure)
    assert zero == one
    (line,) = lines
    assert Cause.PARTS.value[0] in line


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("steps", "causes"),
    [
        ([under_no_sync, in_eval, in_parts], [Cause.HELD, Cause.EVAL, Cause.PARTS]),
        ([whole, whole], []),
        ([whole, in_eval, whole, in_eval], [Cause.EVAL]),
        ([in_eval], [Cause.EVAL]),
        ([under_no_sync], [Cause.HELD]),
        ([whole, in_parts], [Cause.PARTS]),
        ([in_parts, in_parts], [Cause.UNCALLED]),
        ([twice], [Cause.AGAIN]),
        ([whole, twice, in_parts], [Cause.AGAIN, Cause.PARTS]),
        ([by_hand], [Cause.ASSIGNED]),
        ([whole, by_hand], [Cause.ASSIGNED]),
        ([whole, changed, whole], [Cause.CHANGED]),
    ],
)
def test_the_warning_names_the_cause(steps: list[Step], causes: list[Cause]) -> None:
    for lines in run_workers(warnings_of, 2, *steps):
        assert len(lines) == len(causes)
        for line, cause in zip(lines, causes, strict=True):
            what, instead = cause.value
            assert f"backward: {what}; reducing them before the step" in line
            assert line.endswith(instead)
            others = {other.value[0] for other in Cause} - {what}
            assert not [other for other in others if other in line]


def test_an_unknown_cause_is_reported_as_unknown() -> None:
    late = LateGradients()
    late.called(Forward.WHOLE)
    late.touched()
    assert "the cause is not known" in str(late.warning())
    assert late.warning() is None
