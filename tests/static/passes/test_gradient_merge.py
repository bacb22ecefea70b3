# SPDX-License-Identifier: Apache-2.0
"""k backwards make one step, like gradients that accumulate in eager mode."""

from typing import Any

import pytest
import torch
from tests.static.doubling import run
from tests.static.eager import Eager
from tests.static.nets import batch, captured, net
from torch import Tensor, nn

from fleetlight import static
from fleetlight.errors import PlanError
from fleetlight.static.graph.form import Pass
from fleetlight.static.graph.schedule import MERGED, Schedule
from fleetlight.static.ops.marks import GRADIENT
from fleetlight.static.passes import FuseAllReduce, GradientMerge, InsertAllReduce, Overlap

pytestmark = pytest.mark.slow


def merging(
    k: int, avg: bool = True, kind: Any = torch.optim.SGD, **options: Any
) -> tuple[static.Program, torch.optim.Optimizer]:
    model = net()
    optimizer = kind(model.parameters(), **{"lr": 0.1, **options})
    program = captured(model, optimizer)
    program.passes = (GradientMerge(k, avg),)
    return program, optimizer


def seeded(number: int) -> dict[str, Tensor]:
    given = batch(number)
    torch.manual_seed(number)
    return given


@pytest.mark.parametrize(
    ("k", "avg", "kind", "options"),
    [
        (3, True, torch.optim.Adam, {}),
        (2, False, torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
        (4, True, torch.optim.RMSprop, {"lr": 0.01}),
    ],
)
def test_merged_gradients_equal_eager_accumulation(
    k: int, avg: bool, kind: Any, options: dict[str, Any]
) -> None:
    """Batches of all sizes, dropout, running statistics; the learning rate falls between steps."""
    program, mine = merging(k, avg, kind, **options)
    theirs = net()
    other = kind(theirs.parameters(), **{"lr": 0.1, **options})
    eager = Eager(theirs, other, k, avg)
    executor = static.Executor()
    schedules = [torch.optim.lr_scheduler.ExponentialLR(o, 0.7) for o in (mine, other)]
    assert program.model is not None
    for number in range(9):
        given = seeded(number)
        (loss,) = executor.run(program, given, ["loss"])
        torch.manual_seed(number)
        torch.testing.assert_close(loss, eager.run(given), rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(
            program.model.state_dict(), theirs.state_dict(), rtol=1e-9, atol=1e-9
        )
        if (number + 1) % k == 0:
            for schedule in schedules:
                schedule.step()


def test_runs_between_steps_change_only_sums_and_statistics() -> None:
    program, _ = merging(3, kind=torch.optim.Adam)
    before = {str(slot): slot.tensor.clone() for slot in program.state}
    static.Executor().run(program, batch(0))
    changed = {
        slot.kind for slot in program.state if not torch.equal(slot.tensor, before[str(slot)])
    }
    assert changed == {"buffer", "gradient", "schedule"}
    executor = static.Executor()
    for number in (1, 2):
        executor.run(program, batch(number))
    assert not any(s.tensor.any() for s in program.state if s.kind in ("gradient", "schedule"))


def test_every_run_returns_its_fetches() -> None:
    """Between steps, a merged gradient is the sum so far."""
    program, _ = merging(3, avg=False)
    theirs = net()
    eager = Eager(theirs, torch.optim.SGD(theirs.parameters(), lr=0.1), merges=9)
    mark = next(n for n in program.form.graph.nodes if n.target is GRADIENT)
    parameter = dict(theirs.named_parameters())[str(mark.args[1])]
    executor = static.Executor()
    for number in range(3):
        gradient, loss = executor.run(program, seeded(number), [mark.name, "loss"])
        torch.testing.assert_close([gradient, loss], [parameter.grad, eager.run(seeded(number))])


@pytest.mark.parametrize("passes", [(FuseAllReduce(), Overlap()), (), (FuseAllReduce(),)])
def test_gradients_are_reduced_once_per_step(passes: tuple[Pass, ...]) -> None:
    """Reductions double the gradients here, which equals twice the learning rate."""
    program, _ = merging(2)
    program.passes = (*program.passes, InsertAllReduce(), *passes)
    theirs = net()
    eager = Eager(theirs, torch.optim.SGD(theirs.parameters(), lr=0.2), merges=2)
    counts = []
    for number in range(6):
        reduced, _ = run(program, seeded(number))
        counts.append(len(reduced.log))
        eager.run(seeded(number))
    assert program.model is not None
    torch.testing.assert_close(
        program.model.state_dict(), theirs.state_dict(), rtol=1e-9, atol=1e-9
    )
    assert counts == [0, 2 if passes else 12] * 3


def test_gradient_merge_must_run_before_reductions() -> None:
    program, _ = merging(1)
    with pytest.raises(PlanError, match="gradient_merge must run before the passes that reduce"):
        program.apply(InsertAllReduce(), GradientMerge(2))


def test_the_report_names_backwards_and_gradients() -> None:
    program, _ = merging(4)
    assert "4 backwards make one step, 6 gradients are averaged (0.00 MiB)" in program.explain()
    assert [s.name for s in program.state if s.kind == "schedule"] == [MERGED]
    assert "gradient   6 tensors" in program.summary()
    program, _ = merging(1)
    assert "every backward makes a step" in program.explain()
    assert program.form.schedule.is_plain


def test_merging_twice_or_nothing_is_refused() -> None:
    program, _ = merging(2)
    with pytest.raises(PlanError, match="merges backwards already"):
        program.apply(GradientMerge(2))
    with pytest.raises(PlanError, match="has no gradients that enter an optimizer"):
        program.clone(for_test=True).apply(GradientMerge(2))
    with pytest.raises(PlanError, match="got k_steps=0, expected 1 or more"):
        merging(0)[0].form  # noqa: B018
    assert program.clone(for_test=True).form.schedule == Schedule()


def test_unusual_layouts_and_expanded_gradients_are_merged() -> None:
    """The gradient of a sum is expanded; that of a transposed weight has other strides."""

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.turned = nn.Parameter(torch.ones(3, 2).double().t())
            self.summed = nn.Parameter(torch.ones(4).double())

        def forward(self, x: Tensor) -> Tensor:
            return (x @ self.turned).sum() + self.summed.sum()

    model = Odd()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    given = {"x": torch.ones(3, 2).double()}
    program = static.capture(model, lambda output: output, optimizer, given)
    program.passes = (GradientMerge(2, avg=False),)
    executor = static.Executor()
    for _ in range(2):
        executor.run(program, given)
    assert model.turned.tolist() == [[-5.0] * 3] * 2
    assert model.summed.tolist() == [-1.0] * 4
