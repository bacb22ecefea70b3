# SPDX-License-Identifier: Apache-2.0
"""A program follows changes of values in its optimizer and refuses other changes."""

import copy
from typing import Any

import pytest
import torch
from tests.static.nets import batch, captured, net
from torch import Tensor, nn

from fleetlight import static
from fleetlight.errors import PlanError
from fleetlight.static.writing import optimizers

pytestmark = pytest.mark.slow


def trained(kind: Any = torch.optim.Adam) -> tuple[nn.Module, Any, static.Program]:
    """A program after one run."""
    model = net()
    optimizer = kind(model.parameters(), lr=0.01)
    program = captured(model, optimizer)
    static.Executor().run(program, batch(0))
    return model, optimizer, program


def eager_step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    given = batch(number)
    torch.manual_seed(number)
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(given["x"]), given["y"]).backward()
    optimizer.step()


def test_a_loaded_optimizer_state_and_schedule_are_followed() -> None:
    ours, theirs = net(), net()
    mine, other = (torch.optim.Adam(m.parameters(), lr=0.01) for m in (ours, theirs))
    schedules = [torch.optim.lr_scheduler.ExponentialLR(o, 0.5) for o in (mine, other)]
    program, executor = captured(ours, mine), static.Executor()
    for number in range(6):
        given = batch(number)
        torch.manual_seed(number)
        executor.run(program, given)
        eager_step(theirs, other, number)
        if number == 2:
            for optimizer in (mine, other):
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        for schedule in schedules:
            schedule.step()
    torch.testing.assert_close(ours.state_dict(), theirs.state_dict(), rtol=1e-9, atol=1e-9)


def test_options_are_checked_after_loading_a_state() -> None:
    _, optimizer, program = trained()
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    optimizer.param_groups[0]["betas"] = (0.1, 0.2)
    with pytest.raises(PlanError, match=r"group 0 of the optimizer: betas is \(0\.1, 0\.2\)"):
        static.Executor().run(program, batch(0))


def test_a_schedule_may_add_keys_to_a_group() -> None:
    model, optimizer, program = trained(torch.optim.SGD)
    optimizer.param_groups[0]["max_lr"] = 1.0
    before = copy.deepcopy(model.state_dict())
    static.Executor().run(program, batch(1))
    assert not torch.equal(model.state_dict()["0.weight"], before["0.weight"])


def add_group(model: Any, optimizer: Any) -> None:
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})


def add_parameter(model: Any, optimizer: Any) -> None:
    optimizer.param_groups[0]["params"].append(nn.Parameter(torch.ones(2)))


def other_parameter(model: Any, optimizer: Any) -> None:
    optimizer.param_groups[0]["params"][1] = nn.Parameter(torch.ones(12))


def freeze(model: Any, optimizer: Any) -> None:
    model[0].weight.requires_grad_(False)


CHANGES = [
    (add_group, "the optimizer has 2 param groups and had 1 when the program was written"),
    (add_parameter, "group 0 of the optimizer has 7 parameters and had 6"),
    (other_parameter, "group 0 of the optimizer has another parameter at 1 and had 0.bias"),
    (freeze, "parameter 0.weight has requires_grad=False and had requires_grad=True"),
]


@pytest.mark.parametrize(("change", "words"), CHANGES)
def test_changed_groups_and_parameters_are_refused(change: Any, words: str) -> None:
    """Refused before any state changes; an evaluation trains nothing and still runs."""
    model, optimizer, program = trained()
    evaluation = program.clone(for_test=True)
    change(model, optimizer)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(PlanError, match=words + ".*; capture or write the program again"):
        static.Executor().run(program, batch(1))
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    static.Executor().run(evaluation, batch(1), ["loss"])


class Shift(nn.Module):
    """Its derivative needs nothing that the first backward frees."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.bias


def test_an_optimizer_whose_minimize_failed_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> None:
        raise PlanError("no step")

    model = Shift()
    program = static.Program()
    with static.program_guard(program):
        loss = model(static.data("x", [None, 3])).sum()
        wrong = torch.optim.SGD(model.parameters(), lr=0.1)
        with monkeypatch.context() as broken:
            broken.setattr(optimizers, "step", fails)
            with pytest.raises(PlanError, match="no step"):
                static.minimize(wrong, loss)
        static.minimize(torch.optim.SGD(model.parameters(), lr=0.1), loss)
    wrong.param_groups[0]["params"].clear()
    static.Executor().run(program.startup)
    before = model.bias.detach().clone()
    static.Executor().run(program, {"x": torch.ones(4, 3)})
    assert not torch.equal(model.bias, before)
