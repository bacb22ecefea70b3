# SPDX-License-Identifier: Apache-2.0
"""A program follows changes of values in its optimizer and refuses other changes."""

import copy
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from tests.static.doubling import run
from tests.static.nets import accuracy, batch, captured, net
from torch import Tensor, nn

from fleetlight import static
from fleetlight.collective.buckets import BucketLimits
from fleetlight.errors import ConfigError, PlanError
from fleetlight.static import passes
from fleetlight.static.ops.marks import GRADIENT
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


# -- clipping equals that of torch and runs between reduction and step ----------------------------

Clipper = Callable[[Iterable[Tensor]], Any]
CLIPS: list[tuple[dict[str, float], Clipper]] = [
    ({"clip_norm": 0.5}, lambda parameters: nn.utils.clip_grad_norm_(parameters, 0.5)),
    ({"clip_norm": 50.0}, lambda parameters: nn.utils.clip_grad_norm_(parameters, 50.0)),
    ({"clip_value": 0.02}, lambda parameters: nn.utils.clip_grad_value_(parameters, 0.02)),
]


def clipped(model: nn.Module, optimizer: torch.optim.Optimizer, **clip: float) -> static.Program:
    loss = nn.functional.cross_entropy
    return static.capture(model, loss, optimizer, batch(0), {"accuracy": accuracy}, **clip)


@pytest.mark.parametrize("every", [2, 1])
@pytest.mark.parametrize(("clip", "clipper"), CLIPS)
def test_clipping_equals_eager_clipping(
    clip: dict[str, float], clipper: Clipper, every: int
) -> None:
    """Merged gradients are clipped once, after the merge."""
    ours, theirs = net(), net()
    mine, other = (torch.optim.Adam(m.parameters(), lr=0.01) for m in (ours, theirs))
    program, executor = clipped(ours, mine, **clip), static.Executor()
    if every > 1:
        program.passes = (passes.GradientMerge(every, True),)
    for number in range(4):
        given = batch(number)
        torch.manual_seed(number)
        (nn.functional.cross_entropy(theirs(given["x"]), given["y"]) / every).backward()
        if (number + 1) % every == 0:
            clipper(theirs.parameters())
            other.step()
            other.zero_grad()
        torch.manual_seed(number)
        executor.run(program, given)
    torch.testing.assert_close(ours.state_dict(), theirs.state_dict(), rtol=1e-9, atol=1e-11)


def test_the_norm_can_be_fetched() -> None:
    ours, theirs = net(), net()
    program = clipped(ours, torch.optim.SGD(ours.parameters(), lr=0.1), clip_norm=0.1)
    torch.manual_seed(0)
    nn.functional.cross_entropy(theirs(batch(0)["x"]), batch(0)["y"]).backward()
    given = batch(0)
    torch.manual_seed(0)
    theirs.zero_grad()
    nn.functional.cross_entropy(theirs(given["x"]), given["y"]).backward()
    torch.manual_seed(0)
    (norm,) = static.Executor().run(program, given, ["gradient_norm"])
    torch.testing.assert_close(norm, nn.utils.get_total_norm([p.grad for p in theirs.parameters()]))


def test_only_the_optimizer_uses_clipped_gradients() -> None:
    model = net()
    program = clipped(model, torch.optim.SGD(model.parameters(), lr=0.1), clip_norm=1.0)
    marks = [node for node in program.form.graph.nodes if node.target is GRADIENT]
    assert len(marks) == 6
    for mark in marks:
        assert mark.meta["part"] == "backward"
        assert {user.meta["part"] for user in mark.users} == {"update"}


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("clip", "words"),
    [
        ({"clip_norm": 0}, "^clip_norm: got 0, expected a number above 0$"),
        ({"clip_value": -1.0}, "^clip_value: got -1.0, expected a number above 0$"),
        ({"clip_norm": "1"}, "^clip_norm: got '1', expected a number above 0$"),
        ({"clip_norm": 1.0, "clip_value": 1.0}, "^got clip_norm=1.0 and clip_value=1.0, expected"),
    ],
)
def test_invalid_limits_are_refused(clip: dict[str, Any], words: str) -> None:
    model = net()
    with pytest.raises(ConfigError, match=words):
        clipped(model, torch.optim.SGD(model.parameters(), lr=0.1), **clip)


def test_clipping_with_parameter_servers_is_refused() -> None:
    class ServerDistributor:
        def register(self, program: static.Program) -> tuple[str, ...]:
            return ("forward", "backward")

    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.distributor = ServerDistributor()  # type: ignore[attr-defined]
    with pytest.raises(PlanError, match="so it cannot clip its gradients; train eagerly"):
        clipped(model, optimizer, clip_norm=1.0)


def test_clipping_runs_after_the_reduction() -> None:
    """Reductions double the gradients here; the doubled gradients are clipped."""
    ours, theirs = net(), net()
    mine, other = (torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (ours, theirs))
    program = clipped(ours, mine, clip_norm=0.5)
    program.passes = (
        passes.InsertAllReduce(),
        passes.FuseAllReduce(BucketLimits(bytes=400, first_bytes=400)),
        passes.Overlap(),
    )
    for number in range(3):
        given = batch(number)
        torch.manual_seed(number)
        other.zero_grad()
        nn.functional.cross_entropy(theirs(given["x"]), given["y"]).backward()
        for parameter in theirs.parameters():
            assert parameter.grad is not None
            parameter.grad.mul_(2)
        nn.utils.clip_grad_norm_(theirs.parameters(), 0.5)
        other.step()
        torch.manual_seed(number)
        run(program, given)
    torch.testing.assert_close(ours.state_dict(), theirs.state_dict(), rtol=1e-9, atol=1e-11)
