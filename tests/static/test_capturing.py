# SPDX-License-Identifier: Apache-2.0
"""A captured step changes model and optimizer as the eager step does."""

from typing import Any

import pytest
import torch
from tests.static.nets import accuracy, batch, captured, net
from torch import Tensor, nn

from fleetlight import static
from fleetlight.errors import ConfigError, PlanError
from fleetlight.optim import Ftrl, Lamb, Lars, RowwiseAdagrad, RowwiseAdam

pytestmark = pytest.mark.slow

OPTIMIZERS: list[tuple[Any, dict[str, Any]]] = [
    (torch.optim.Adam, {"lr": 0.01, "amsgrad": True}),
    (torch.optim.SGD, {"lr": 0.1}),
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    (torch.optim.AdamW, {"lr": 0.01}),
    (torch.optim.Adagrad, {"lr": 0.1, "lr_decay": 0.1, "initial_accumulator_value": 0.5}),
    (torch.optim.RMSprop, {"lr": 0.01, "momentum": 0.5, "centered": True}),
    (torch.optim.Adadelta, {"lr": 1.0}),
    (Lars, {"lr": 1.0, "lars_coeff": 0.1}),
    (Lamb, {"lr": 0.01}),
    (Ftrl, {"lr": 0.1, "l1": 0.01, "l2": 0.01}),
    (RowwiseAdagrad, {"lr": 0.1, "lr_decay": 0.1, "initial_accumulator_value": 0.5}),
    (RowwiseAdam, {"lr": 0.01, "weight_decay": 0.01}),
]


def eager(
    model: nn.Module, optimizer: torch.optim.Optimizer, given: dict[str, Tensor]
) -> tuple[Tensor, Tensor]:
    output = model(given["x"])
    loss = nn.functional.cross_entropy(output, given["y"])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.detach(), accuracy(output, given["y"])


@pytest.mark.parametrize(("kind", "options"), OPTIMIZERS)
def test_captured_steps_equal_eager_training(kind: Any, options: dict[str, Any]) -> None:
    """With dropout, running statistics, batches of all sizes and a schedule."""
    ours, theirs = net(), net()
    mine, other = (kind(model.parameters(), **options) for model in (ours, theirs))
    program, executor = captured(ours, mine), static.Executor()
    schedules = [torch.optim.lr_scheduler.ExponentialLR(o, 0.7) for o in (mine, other)]
    for number in range(6):
        torch.manual_seed(number)
        expected = eager(theirs, other, batch(number))
        torch.manual_seed(number)
        found = executor.run(program, batch(number), ["loss", "accuracy"])
        torch.testing.assert_close(found, list(expected), rtol=1e-9, atol=1e-9)
        for schedule in schedules:
            schedule.step()
    torch.testing.assert_close(ours.state_dict(), theirs.state_dict(), rtol=1e-8, atol=1e-9)
    torch.testing.assert_close(
        mine.state_dict()["state"], other.state_dict()["state"], rtol=1e-6, atol=1e-8
    )


def test_captured_and_eager_steps_can_alternate() -> None:
    """The program uses the state of the live model and optimizer."""
    ours, theirs = net(), net()
    mine, other = (torch.optim.Adam(m.parameters(), lr=0.01) for m in (ours, theirs))
    program = captured(ours, mine)
    executor = static.Executor()
    for number in range(4):
        torch.manual_seed(number)
        eager(theirs, other, batch(number))
        torch.manual_seed(number)
        if number % 2:
            eager(ours, mine, batch(number))
        else:
            executor.run(program, batch(number))
    torch.testing.assert_close(ours.state_dict(), theirs.state_dict(), rtol=1e-6, atol=1e-9)


def test_capturing_changes_nothing() -> None:
    model = net()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    batch(0)  # sets the seed
    rng = torch.get_rng_state()
    captured(model, torch.optim.Adam(model.parameters()))
    torch.testing.assert_close(dict(model.state_dict()), before, rtol=0, atol=0)
    assert torch.equal(torch.get_rng_state(), rng)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_frozen_and_unused_parameters_do_not_change() -> None:
    class Partly(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused, self.frozen = (nn.Linear(2, 2) for _ in range(3))
            self.frozen.requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            return self.used(self.frozen(x))

    model = Partly()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    given = {"x": torch.ones(3, 2), "y": torch.zeros(3, 2)}
    static.Executor().run(static.capture(model, nn.functional.mse_loss, optimizer, given), given)
    moved = {n for n, v in model.state_dict().items() if not torch.equal(v, before[n])}
    assert moved == {"used.weight", "used.bias"}


def test_each_param_group_has_its_own_rate() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    groups = [{"params": model[0].parameters(), "lr": 0.0}, {"params": model[1].parameters()}]
    optimizer = torch.optim.SGD(groups, lr=0.5)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    given = {"x": torch.ones(3, 2), "y": torch.zeros(3, 2)}
    static.Executor().run(static.capture(model, nn.functional.mse_loss, optimizer, given), given)
    moved = {n for n, v in model.state_dict().items() if not torch.equal(v, before[n])}
    assert moved == {"1.weight", "1.bias"}


def branches_on_values(output: Tensor, _: Tensor) -> Tensor:
    return output.sum() if output.sum() > 0 else -output.sum()


def loops_over_values(output: Tensor, _: Tensor) -> Tensor:
    return sum((output.sum() for _ in range(int(output.argmax()))), output.sum())


@pytest.mark.parametrize("loss", [branches_on_values, loops_over_values])
def test_control_flow_on_values_is_refused(loss: Any) -> None:
    model = nn.Linear(8, 3).double()
    with pytest.raises(PlanError, match=r"reads the values of its tensors .*torch\.where"):
        static.capture(model, loss, torch.optim.SGD(model.parameters(), lr=0.1), batch(0))


def test_unsupported_optimizers_are_refused() -> None:
    model = net()
    with pytest.raises(PlanError, match=r"got the optimizer NAdam, expected .* SGD, Adam, AdamW"):
        captured(model, torch.optim.NAdam(model.parameters()))
    with pytest.raises(PlanError, match=r"dampening=0\.1"):
        captured(model, torch.optim.SGD(model.parameters(), lr=1, momentum=0.9, dampening=0.1))
    with pytest.raises(PlanError, match=r"a parameter of shape \[12, 8\] that is not one of"):
        captured(model, torch.optim.SGD(net().parameters(), lr=0.1))


def test_a_fixed_batch_size_is_checked() -> None:
    """The loss reads the batch size, so the program is valid for that size."""
    model = nn.Linear(8, 3).double()

    def loss(output: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(output, labels, reduction="sum") / len(labels)

    program = static.capture(model, loss, torch.optim.SGD(model.parameters(), lr=0.1), batch(0))
    assert program.feeds["y"].shape == (16,)
    with pytest.raises(ConfigError, match=r"got the shape \[7, 8\], expected \[16, 8\]"):
        static.Executor().run(program, batch(1))


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "given", [(torch.zeros(2, 4),), torch.zeros(2, 4)], ids=["tuple", "tensor"]
)
def test_unnamed_inputs_are_refused(given: Any) -> None:
    with pytest.raises(ConfigError, match="expected a mapping of names to tensors"):
        static.capture(nn.Linear(4, 1), None, None, given)
