# SPDX-License-Identifier: Apache-2.0
"""Mixed precision in a program follows the autocast and GradScaler of torch."""

from typing import Any

import pytest
import torch
from tests.static.doubling import run
from tests.static.eager import Eager
from torch import Tensor, nn

from fleetlight import static
from fleetlight.errors import PlanError
from fleetlight.static.graph.schedule import SCALE, scaler_state
from fleetlight.static.passes import (
    Amp,
    FuseAllReduce,
    GradientMerge,
    InsertAllReduce,
    Overlap,
    Recompute,
)

pytestmark = pytest.mark.slow


class Mixed(nn.Module):
    """Convolution, norms and attention."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.convolve = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())
        self.attend = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.leave = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.convolve(x.view(-1, 1, 6, 8)).mean(1)
        out: Tensor = self.leave(self.attend(y).mean(1))
        return out


def batch(number: int) -> dict[str, Tensor]:
    """Labels follow a rule that the model can learn."""
    x = torch.randn(24, 48, generator=torch.Generator().manual_seed(number))
    return {"x": x, "y": (x[:, 0] > 0).long() + (x[:, 1] > 0).long()}


def pair(*passes: Any, **options: Any) -> tuple[static.Program, Eager]:
    ours, theirs = Mixed(), Mixed()
    mine, other = (torch.optim.SGD(m.parameters(), lr=0.2, momentum=0.5) for m in (ours, theirs))
    program = static.capture(ours, nn.functional.cross_entropy, mine, batch(0))
    program.passes = passes
    return program, Eager(theirs, other, **options)


def largest_difference(program: static.Program, eager: Eager) -> float:
    assert program.model is not None
    mine, theirs = program.model.state_dict(), eager.model.state_dict()
    return max(float((mine[n].double() - theirs[n].double()).abs().max()) for n in mine)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.bfloat16, 0.05), (torch.float16, 0.005)], ids=["bf16", "fp16"]
)
def test_amp_trains_as_eager_autocast_does(dtype: torch.dtype, tolerance: float) -> None:
    program, eager = pair(Amp(str(dtype).removeprefix("torch.")), dtype=dtype)
    losses = []
    executor = static.Executor()
    for number in range(12):
        (loss,) = executor.run(program, batch(number), ["loss"])
        torch.testing.assert_close(loss, eager.run(batch(number)), rtol=tolerance, atol=tolerance)
        losses.append(float(loss))
    assert largest_difference(program, eager) < tolerance
    assert losses[-1] < 0.9 * losses[0]
    parameters = [s.tensor.dtype for s in program.state if s.kind in ("parameter", "optimizer")]
    assert set(parameters) == {torch.float32}


@pytest.mark.parametrize("order", [0, 1, 2])
def test_three_passes_together_equal_their_eager_counterpart(order: int) -> None:
    passes: list[Any] = [Recompute(("convolve", "attend")), Amp("float16"), GradientMerge(2)]
    program, eager = pair(*(passes[order:] + passes[:order]), merges=2, dtype=torch.float16)
    executor = static.Executor()
    for number in range(6):
        (loss,) = executor.run(program, batch(number), ["loss"])
        torch.testing.assert_close(loss, eager.run(batch(number)), rtol=0.01, atol=0.01)
    assert largest_difference(program, eager) < 0.005
    assert len(program.explain().splitlines()) == 3


@pytest.mark.parametrize("merges", [1, 2])
def test_an_overflowed_step_is_skipped_and_the_scale_shrinks(merges: int) -> None:
    """The first scale is too large for float16; eager autocast lowers it as far."""
    passes = [Amp("float16", 2.0**40)] + [GradientMerge(merges)] * (merges > 1)
    program, eager = pair(*passes, merges=merges, dtype=torch.float16, first_scale=2.0**40)
    optimizer = program.optimizer
    assert optimizer is not None
    slots = {slot.name: slot.tensor for slot in program.state if slot.kind == "schedule"}
    first = [p.detach().clone() for group in optimizer.param_groups for p in group["params"]]
    executor = static.Executor()
    for number in range(32 * merges):
        executor.run(program, batch(number % 3))
        eager.run(batch(number % 3))
        now = [p for group in optimizer.param_groups for p in group["params"]]
        stepped = any(not torch.equal(p, q) for p, q in zip(now, first, strict=True))
    assert stepped
    assert all(p.isfinite().all() for p in now)
    # the program sums more in float32 than autocast, which overflows a little longer
    assert 1 <= float(slots[SCALE]) / eager.scaler.get_scale() <= 4
    eager.scaler.load_state_dict(
        {**eager.scaler.state_dict(), **(scaler_state(program.state) or {})}
    )
    assert eager.scaler.get_scale() == float(slots[SCALE])


@pytest.mark.parametrize("merges", [1, 2])
def test_overflow_is_checked_in_the_reduced_gradients(merges: int) -> None:
    """Reductions double the gradients here, which equals twice the learning rate."""
    merge = [GradientMerge(merges)] * (merges > 1)
    reduction = [InsertAllReduce(), FuseAllReduce(), Overlap()]
    program, eager = pair(Amp("float16"), *merge, *reduction, merges=merges, dtype=torch.float16)
    for group in eager.optimizer.param_groups:
        group["lr"] *= 2
    counts = []
    for number in range(2 * merges):
        counts.append(len(run(program, batch(number))[0].log))
        eager.run(batch(number))
    assert largest_difference(program, eager) < 0.005
    assert counts == ([0] * (merges - 1) + [2]) * 2
    slots = {slot.name: slot.tensor for slot in program.state if slot.kind == "schedule"}
    before = [p.clone() for p in program.parameters()]
    slots[SCALE].fill_(torch.finfo(torch.float32).max)
    for number in range(merges):
        run(program, batch(number))
    assert all(map(torch.equal, before, program.parameters()))


def test_a_static_loss_scale_does_not_grow() -> None:
    program, _ = pair(Amp("float16", 1024.0, use_dynamic_loss_scaling=False))
    assert program.form.schedule.growth_interval == 1 << 30
    assert "scaled by 1024 at first" in program.explain()


def test_an_evaluation_supports_amp() -> None:
    program, eager = pair(Amp())
    eager.model.eval()
    test = program.clone(for_test=True).apply(Amp("float16"))
    assert test.form.schedule.is_plain
    for evaluation in (test, program.apply().clone(for_test=True)):
        (output,) = static.Executor().run(evaluation, batch(1), ["output"])
        with torch.no_grad():
            expected = eager.model(batch(1)["x"])
        assert output.dtype == torch.float32
        assert not torch.equal(output, expected)
        torch.testing.assert_close(output, expected, rtol=0.05, atol=0.05)


@pytest.mark.long
def test_unsupported_settings_are_refused() -> None:
    program, _ = pair()
    with pytest.raises(PlanError, match="got dtype='float8'"):
        program.apply(Amp("float8"))
    with pytest.raises(PlanError, match="scales its loss already"):
        program.apply(Amp("float16"), Amp("float16"))
    with pytest.raises(PlanError, match="amp must run before the passes that reduce gradients"):
        program.apply(InsertAllReduce(), Amp("float16"))
