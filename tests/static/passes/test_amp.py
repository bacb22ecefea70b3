# SPDX-License-Identifier: Apache-2.0
"""Mixed precision in a program follows the autocast and GradScaler of torch."""

from typing import Any

import pytest
import torch
from tests.errors import refuses
from tests.static.doubling import run
from tests.static.eager import Eager
from tests.static.nets import batch, captured, net
from tests.static.peak_memory import peak_bytes
from torch import Tensor, nn

from fleetlight import static
from fleetlight.errors import PlanError
from fleetlight.static.graph.form import Pass, graph_of
from fleetlight.static.graph.schedule import MERGED, SCALE, Schedule, scaler_state
from fleetlight.static.ops.marks import GRADIENT
from fleetlight.static.passes import (
    Amp,
    FuseAllReduce,
    GradientMerge,
    InsertAllReduce,
    Overlap,
    Recompute,
)
from fleetlight.static.running.runners import EVERYTHING

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


def wide_batch(number: int) -> dict[str, Tensor]:
    """Labels follow a rule that the model can learn."""
    x = torch.randn(24, 48, generator=torch.Generator().manual_seed(number))
    return {"x": x, "y": (x[:, 0] > 0).long() + (x[:, 1] > 0).long()}


def pair(*passes: Any, **options: Any) -> tuple[static.Program, Eager]:
    ours, theirs = Mixed(), Mixed()
    mine, other = (torch.optim.SGD(m.parameters(), lr=0.2, momentum=0.5) for m in (ours, theirs))
    program = static.capture(ours, nn.functional.cross_entropy, mine, wide_batch(0))
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
        (loss,) = executor.run(program, wide_batch(number), ["loss"])
        torch.testing.assert_close(
            loss, eager.run(wide_batch(number)), rtol=tolerance, atol=tolerance
        )
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
        (loss,) = executor.run(program, wide_batch(number), ["loss"])
        torch.testing.assert_close(loss, eager.run(wide_batch(number)), rtol=0.01, atol=0.01)
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
        executor.run(program, wide_batch(number % 3))
        eager.run(wide_batch(number % 3))
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
        counts.append(len(run(program, wide_batch(number))[0].log))
        eager.run(wide_batch(number))
    assert largest_difference(program, eager) < 0.005
    assert counts == ([0] * (merges - 1) + [2]) * 2
    slots = {slot.name: slot.tensor for slot in program.state if slot.kind == "schedule"}
    before = [p.clone() for p in program.parameters()]
    slots[SCALE].fill_(torch.finfo(torch.float32).max)
    for number in range(merges):
        run(program, wide_batch(number))
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
        (output,) = static.Executor().run(evaluation, wide_batch(1), ["output"])
        with torch.no_grad():
            expected = eager.model(wide_batch(1)["x"])
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


# -- k backwards make one step, like gradients that accumulate in eager mode ----------------------


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
        expected = eager.run(seeded(number))  # which sets the gradient
        torch.testing.assert_close([gradient, loss], [parameter.grad, expected])


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


# -- modules that recompute their activations in backward: equal numbers in less memory -----------

BLOCKS = ("1", "2", "3", "4", "5")


def block() -> nn.Module:
    """With operations in place, and with everything that must not run twice."""
    return nn.Sequential(
        *(nn.Linear(32, 32), nn.BatchNorm1d(32), nn.ReLU(inplace=True)),
        *(nn.Linear(32, 32), nn.Dropout(0.2, inplace=True), nn.Tanh(), nn.Linear(32, 32)),
    )


def deep() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), *[block() for _ in BLOCKS], nn.Linear(32, 3)).double()


class RepeatedBlock(nn.Module):
    """One block that is called several times on its own output."""

    def __init__(self, times: int = 6) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.enter, self.block, self.leave = nn.Linear(8, 32), block(), nn.Linear(32, 3)
        self.times = times
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for _ in range(self.times):
            x = x + self.block(x)
        return self.leave(x)


class Recurrent(nn.Module):
    """Its gates are slices of one tensor."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net, self.leave = nn.LSTM(4, 6, batch_first=True), nn.Linear(6, 3)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.leave(self.net(x.reshape(-1, 2, 4))[0][:, -1])


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
        self.leave = nn.Linear(4, 3)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.leave(self.layer(x.reshape(-1, 2, 4)).mean(1))


def trained(model: nn.Module, names: tuple[str, ...]) -> tuple[static.Program, list[Tensor]]:
    """Three steps; returns the fetched values and the final state."""
    program = captured(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    if names:
        program.passes = (Recompute(names),)
    found = []
    executor = static.Executor()
    for number in range(3):
        given = batch(number)
        torch.manual_seed(number)
        found += executor.run(program, given, ["loss", "output"])
    return program, [*found, *(slot.tensor for slot in program.state)]


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        (deep, BLOCKS),
        pytest.param(deep, ("2.0", "2.1", "2.2", "4"), marks=pytest.mark.long),
        pytest.param(deep, ("",), marks=pytest.mark.long),
        pytest.param(RepeatedBlock, ("block",), marks=pytest.mark.long),
        (RepeatedBlock, ("block.0", "block.4", "enter")),
        (Recurrent, ("net",)),
        (Attention, ("layer",)),
        pytest.param(Attention, ("layer.self_attn", "layer.linear1"), marks=pytest.mark.long),
    ],
)
def test_recompute_changes_no_bit_of_the_results(kind: type[nn.Module], names: tuple[str]) -> None:
    """With dropout, with statistics that must count a batch once, and in place."""
    _, expected = trained(kind(), ())
    program, found = trained(kind(), names)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert "again in backward" in program.explain()
    assert "compute 0 operations" not in program.explain()


def memory(kind: type[nn.Module], names: tuple[str, ...]) -> int:
    form = trained(kind(), names)[0].form
    torch.manual_seed(0)
    return peak_bytes(form, [torch.randn(256, 8).double(), torch.randint(0, 3, (256,))])


@pytest.mark.long
def test_recompute_needs_less_memory() -> None:
    whole = memory(deep, ())  # type: ignore[arg-type]
    assert memory(deep, BLOCKS) < 0.6 * whole  # type: ignore[arg-type]
    # one region as large as the model saves nothing
    assert memory(deep, ("",)) == whole  # type: ignore[arg-type]


@pytest.mark.long
def test_each_call_of_a_module_is_recomputed_separately() -> None:
    assert memory(RepeatedBlock, ("block",)) < 0.6 * memory(RepeatedBlock, ())


def test_random_numbers_and_statistics_are_not_recomputed() -> None:
    program, _ = trained(deep(), BLOCKS)
    plain, _ = trained(deep(), ())
    for target in (torch.ops.aten.bernoulli_.float, torch.ops.aten.add_.Tensor):
        counts = [
            sum(n.target is target for n in graph_of(p.form, [], EVERYTHING).nodes)
            for p in (plain, program)
        ]
        assert counts[0] == counts[1] > 0
    statistics = [
        node.args[3:5]
        for node in program.form.graph.nodes
        if node.target is torch.ops.aten.native_batch_norm.default
        and node.meta["part"] == "backward"
    ]
    assert statistics == [(None, None)] * len(BLOCKS)
    assert f"keep {len(BLOCKS)} values that must not be computed twice" in program.explain()


class Shifted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(self.inner(torch.cos(x)))


class ChangesInput(nn.Module):
    """The input of a module changes after the call."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.shifted, self.last = nn.Linear(8, 8), Shifted(), nn.Linear(8, 8)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        y = self.shifted(x.detach())
        x.detach().mul_(3)
        return self.last(y + x.detach())


def test_values_read_from_a_changed_input_are_kept() -> None:
    _, expected = trained(ChangesInput(), ())
    program, found = trained(ChangesInput(), ("shifted",))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert "keep 1 values" in program.explain()


def test_a_module_that_does_not_exist_is_named() -> None:
    with refuses(PlanError, "checkpoints: no module 'blok' computes a value", "'block'"):
        trained(RepeatedBlock(), ("blok",))


def test_a_program_without_training_accepts_recompute() -> None:
    program, _ = trained(deep(), ())
    test = program.clone(for_test=True)
    again = test.apply(Recompute(BLOCKS))
    given = {"x": batch(0)["x"]}
    for one, other in zip(
        static.Executor().run(test, given, ["output"]),
        static.Executor().run(again, given, ["output"]),
        strict=True,
    ):
        assert torch.equal(one, other)
