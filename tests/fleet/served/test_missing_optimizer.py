# SPDX-License-Identifier: Apache-2.0
"""With servers, a script without a registered optimizer may evaluate but not train."""

from typing import Any

import pytest
import torch
from tests.served import ASYNC, SYNC, Job, Member, Net, geo, run
from torch import nn

from fleetlight.errors import PlanError

ONE = torch.tensor([[1, 2, 3]])


def unregistered() -> Any:
    return Net(), []


class Dense(nn.Module):
    """A model without tables."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.linear(ids.float())  # type: ignore[no-any-return]


@pytest.mark.parametrize("model", [Net, Dense])
@pytest.mark.parametrize("mode", [SYNC, ASYNC, geo(2)], ids=["sync", "async", "geo"])
def test_training_without_a_registered_optimizer_is_refused(
    model: type[nn.Module], mode: dict[str, Any]
) -> None:
    def train(worker: Member) -> None:
        optimizer = torch.optim.SGD(worker.model.parameters(), lr=0.1)
        worker.model(ONE).sum().backward()
        optimizer.step()

    [error] = Job(lambda: (model(), []), mode, workers=1, servers=1).tried(train)
    assert isinstance(error, PlanError)
    assert "add optimizer = fleet.distributed_optimizer(optimizer) before" in str(error)


def test_evaluation_needs_no_optimizer() -> None:
    def evaluate(worker: Member) -> Any:
        with torch.no_grad():
            without = worker.model(ONE)
        # also with gradients enabled, as long as no backward runs
        return torch.equal(without, worker.model(ONE))

    assert run(unregistered, evaluate, workers=1) == [True]


def test_step_of_an_optimizer_registered_too_late_is_refused() -> None:
    def train(worker: Member) -> None:
        worker.model(ONE)
        optimizer = torch.optim.SGD(worker.model.parameters(), lr=0.1)
        worker.context.optimizers.append(worker.context.manage_optimizer(optimizer))
        worker.model(ONE).sum().backward()
        optimizer.step()

    [error] = Job(unregistered, SYNC, workers=1, servers=1).tried(train)
    assert "registered after training had begun" in str(error)


def test_model_trains_locally_after_the_job() -> None:
    def leave(worker: Member) -> None:
        worker.model(ONE)
        [plan] = worker.context.models
        plan.close()
        worker.model(ONE).sum().backward()

    run(lambda: (Dense(), []), leave, workers=1)
