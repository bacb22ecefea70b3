# SPDX-License-Identifier: Apache-2.0
"""Dynamic sizes have readable names, equal in every process."""

import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tests.errors import refuses
from tests.static import kinds
from torch import Tensor, fx, nn

from fleetlight import static
from fleetlight.errors import ConfigError, PlanError
from fleetlight.static import passes
from fleetlight.static.graph.aliases import Memory, base_of, changed_by, is_view, looked_at
from fleetlight.static.graph.feeds import Feed, Limit, accept, feed_of
from fleetlight.static.graph.form import Sizes
from fleetlight.static.graph.schedule import (
    GROWTH,
    MERGED,
    SCALE,
    Schedule,
    load_scaler_state,
    scaler_state,
    scaling_slots,
)
from fleetlight.static.graph.state import Slot
from fleetlight.static.ops.marks import GRADIENT, LAID_OUT


def written() -> tuple[static.Program, Tensor]:
    program = static.Program()
    with static.program_guard(program):
        x = static.data("x", [None, None, 4])
        other = static.data("other", [None, 2])
        flat = x.reshape(-1, 4)
        output = flat.sum(0) + torch.cat([other, other]).sum()
    return program, output


def test_dynamic_sizes_are_named_batch_or_by_feed() -> None:
    program, _ = written()
    lines = str(program).splitlines()
    assert any(line.startswith("x ") and "float32[batch, x_1, 4]" in line for line in lines)
    assert any("float32[other_0, 2]" in line for line in lines)
    assert any("float32[batch*x_1, 4]" in line for line in lines)
    assert any("float32[2*other_0, 2]" in line for line in lines)


def test_size_names_do_not_depend_on_earlier_programs() -> None:
    assert str(written()[0]) == str(written()[0])


def test_all_kinds_of_values_are_described() -> None:
    sizes = Sizes(written()[0].form)
    tensor = torch.zeros(2, 3, dtype=torch.bool)
    assert sizes.value(tensor) == "bool[2, 3]"
    assert sizes.value((tensor, [torch.ones(())])) == "(bool[2, 3], (float32[]))"
    assert sizes.value(3) == "3"
    assert sizes.value(None) == ""


# -- which feeds a program accepts and refuses ----------------------------------------------------

X = Feed("x", (None, 3), torch.float32, ("batch", None))
Y = Feed("y", (None,), torch.int64, ("batch",))
FEEDS = {"x": X, "y": Y}


def given(batch: int = 2) -> dict[str, Any]:
    return {"x": torch.ones(batch, 3), "y": torch.zeros(batch, dtype=torch.int64)}


def test_feeds_are_ordered_as_the_program_takes_them() -> None:
    x, y = accept(FEEDS, {"y": np.array([1, 2]), "x": np.ones((2, 3), np.float32)})
    assert (x.shape, y.tolist()) == ((2, 3), [1, 2])
    assert len(accept(FEEDS, given(7))[0]) == 7


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"x": None}, r"feed 'x' is missing: .* x: float32\[\?, 3\]; y: int64\[\?\], got 'y'"),
        ({"z": 1}, "feed 'z' is not one of this program"),
        ({"x": torch.ones(2, 4)}, r"'x': got the shape \[2, 4\], expected \[any, 3\]"),
        ({"x": torch.ones(3)}, r"got the shape \[3\]"),
        ({"x": torch.ones(2, 3).double()}, r"'x': got torch.float64, expected torch.float32"),
        ({"y": [[]]}, "feed 'y': got torch.float64"),
        ({"x": object()}, "feed 'x': got a object, expected a tensor"),
        ({"x": torch.ones(3, 3)}, "'y' has 2 in dimension 0, and feed 'x' 3 in dimension 0"),
    ],
)
def test_mismatched_feeds_are_refused(change: dict[str, Any], words: str) -> None:
    feeds = {name: value for name, value in {**given(), **change}.items() if value is not None}
    with pytest.raises(ConfigError, match=words):
        accept(FEEDS, feeds)


def test_a_size_read_by_the_program_is_fixed() -> None:
    with pytest.raises(ConfigError, match=r"got the shape \[2, 3\], expected \[4, 3\]"):
        Feed("x", (4, 3), torch.float32).accepted(torch.ones(2, 3))


@pytest.mark.parametrize("declared", [(None,), (None, 1), (4,), (4, 1)])
@pytest.mark.parametrize("fed", [(4,), (4, 1)])
def test_labels_are_fed_as_a_row_or_as_a_column(
    declared: tuple[int | None, ...], fed: tuple[int, ...]
) -> None:
    accepted = Feed("y", declared, torch.int64).accepted(torch.arange(4).reshape(fed))
    assert accepted.shape == (4, 1)[: len(declared)]
    assert accepted.flatten().tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("declared", "fed"),
    [((None, 1), (4, 2)), ((None,), (4, 2)), ((5, 1), (4,)), ((None, 1), (1, 4))],
)
def test_other_shapes_of_labels_are_refused(
    declared: tuple[int | None, ...], fed: tuple[int, ...]
) -> None:
    with pytest.raises(ConfigError, match=r"'y': got the shape \["):
        Feed("y", declared, torch.int64).accepted(torch.zeros(fed, dtype=torch.int64))


def test_declarations_accept_minus_one_and_type_names() -> None:
    assert feed_of("x", [-1, 3], "float32") == feed_of("x", [None, 3], torch.float32)
    for shape, dtype in (([0], "float32"), (["a"], "float32"), ([1], "float33"), ([1], 3)):
        with pytest.raises(ConfigError, match="data 'x'"):
            feed_of("x", shape, dtype)  # type: ignore[arg-type]


@pytest.mark.parametrize("shape", [4, "4", None])
def test_a_shape_is_a_list(shape: Any) -> None:
    with pytest.raises(ConfigError, match=r"^data 'q': got the shape .*, expected a list of sizes"):
        feed_of("q", shape, "float32")


def test_misspelt_types_get_a_suggestion() -> None:
    with pytest.raises(ConfigError, match=r"dtype='flot32', expected .*did you mean 'float32'"):
        feed_of("q", [4], "flot32")
    with pytest.raises(ConfigError, match=r"known names: float32, float64, bfloat16, int64"):
        feed_of("q", [4], "zzz")


# -- which values share memory, and therefore keep their order ------------------------------------

aten = torch.ops.aten


def inputs(graph: fx.Graph, count: int = 2) -> list[fx.Node]:
    return [graph.placeholder(f"x{number}") for number in range(count)]


@pytest.mark.parametrize(
    ("target", "args"),
    [
        (aten.t.default, ()),
        (aten.view.default, ([-1],)),
        (aten.expand.default, ([2, 3],)),
        (aten._unsafe_view.default, ([-1],)),
        (GRADIENT, ("weight",)),
    ],
)
def test_views_are_recognised(target: object, args: tuple[object, ...]) -> None:
    graph = fx.Graph()
    [x] = inputs(graph, 1)
    node = graph.call_function(target, (x, *args))  # type: ignore[arg-type]
    assert is_view(node)
    assert base_of(graph.call_function(aten.t.default, (node,))) is x


def test_split_parts_are_views_and_other_tuple_items_are_not() -> None:
    graph = fx.Graph()
    x, y = inputs(graph)
    split = graph.call_function(aten.split_with_sizes.default, (x, [1, 2]))
    assert base_of(graph.call_function(operator.getitem, (split, 1))) is x
    several = graph.call_function(aten.topk.default, (y, 2))
    one = graph.call_function(operator.getitem, (several, 0))
    assert looked_at(one) is None
    assert not is_view(one)


def test_changed_arguments_are_found() -> None:
    graph = fx.Graph()
    x, y = inputs(graph)
    added = graph.call_function(aten.add_.Tensor, (x, y))
    assert (list(changed_by(added)), base_of(added), is_view(added)) == ([x], x, False)
    several = graph.call_function(aten._foreach_add_.List, ([x, y], [y, x]))
    assert list(changed_by(several)) == [x, y]
    given = graph.call_function(aten.add.out, (x, x), {"out": y})
    assert (list(changed_by(given)), base_of(given)) == ([y], y)
    w, b, mean, var = inputs(graph, 4)
    norm = graph.call_function(aten.native_batch_norm.default, (x, w, b, mean, var, True, 0.1, 0))
    assert list(changed_by(norm)) == [mean, var]


def test_a_laid_out_gradient_is_not_a_free_view() -> None:
    graph = fx.Graph()
    x, y = inputs(graph)
    node = graph.call_function(LAID_OUT, (x, y))
    assert base_of(node) is x
    assert not is_view(node)


def test_reads_and_writes_keep_their_order() -> None:
    graph = fx.Graph()
    x, y = inputs(graph)
    view = graph.call_function(aten.t.default, (x,))
    early = graph.call_function(aten.sin.default, (view,))
    change = graph.call_function(aten.add_.Tensor, (x, y))
    late = graph.call_function(aten.cos.default, (view,))
    other = graph.call_function(aten.cos.default, (y,))
    memory = Memory(graph)
    assert memory.before(change) == {x, y, view, early}
    assert memory.after(change) == {late}
    assert memory.after(early) == {change}
    assert memory.before(late) == {view, change}
    assert memory.before(other) == {y}


# -- the state of a schedule, and how it changes the loss scale -----------------------------------

INF = float("inf")


def gradient(value: float, kind: torch.dtype = torch.float32) -> Slot:
    return Slot("gradient", str(kind), torch.full((2,), value, dtype=kind))


def test_a_plain_schedule_steps_in_each_run() -> None:
    plain = Schedule()
    assert plain.is_plain
    assert plain.slots() == []
    assert [plain.count_backward([]), plain.unscale([])] == [True, True]


def test_the_last_of_k_backwards_steps_and_clears_the_sums() -> None:
    schedule = Schedule(merges=3)
    state = [*schedule.slots(), gradient(5.0), gradient(5.0, torch.float64)]
    assert not schedule.is_plain
    assert [schedule.count_backward(state) for _ in range(3)] == [False, False, True]
    schedule.restart(state)
    assert [float(slot.tensor.sum()) for slot in state] == [0, 0, 0]
    assert state[0].name == MERGED
    assert not schedule.count_backward(state)


@pytest.mark.parametrize("interval", [2, 1 << 30])
def test_the_loss_scale_follows_grad_scaler(interval: int) -> None:
    """The scale grows after some finite steps and shrinks at an overflow, which skips the step."""
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=interval)
    schedule = Schedule(growth_interval=interval)
    scaling = scaling_slots(8.0, torch.device("cpu"))
    parameter = torch.nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    for value in (8.0, 8.0, INF, 8.0, float("nan"), 4.0, 4.0):
        state = [*scaling, gradient(value)]
        parameter.data.zero_()
        parameter.grad = scaler.scale(torch.ones(())) * 0 + torch.full((2,), value)
        scaler.step(optimizer)
        scaler.update()
        assert schedule.unscale(state) == bool(parameter.any())
        if parameter.any():
            assert torch.equal(state[-1].tensor, -parameter)
        kept = scaler.state_dict()
        assert scaler_state(state) == {name: kept[name] for name in ("scale", "_growth_tracker")}


def test_one_infinite_gradient_skips_the_whole_step() -> None:
    state = [*scaling_slots(4.0, torch.device("cpu")), gradient(4.0), gradient(INF, torch.float64)]
    assert not Schedule(growth_interval=9).unscale(state)


def test_the_loss_scale_can_be_saved_and_loaded() -> None:
    old, new = (scaling_slots(first, torch.device("cpu")) for first in (4.0, 64.0))
    old[1].tensor.fill_(7)
    load_scaler_state(new, scaler_state(old))
    assert [(slot.name, float(slot.tensor)) for slot in new] == [(SCALE, 4.0), (GROWTH, 7.0)]
    load_scaler_state(new, None)
    assert scaler_state(new) == scaler_state(old)
    assert scaler_state(Schedule(merges=2).slots()) is None


# -- A program is valid for the sizes at which its branches would be the same ---------------------


#: how the code reads a batch of 7 records, and the resulting limit
LOOKS: list[tuple[Callable[[Tensor], bool], str]] = [
    (lambda x: x.shape[0] > 4, "at least 5"),
    (lambda x: x.shape[0] <= 4, "at least 5"),
    (lambda x: 2 * x.shape[0] - 1 < 20, "at most 10"),
    (lambda x: x.shape[0] == 1, "other than 1"),
    (lambda x: 3 <= x.shape[0] < 9, "at least 3 and at most 8"),
    (lambda x: x.size(0) * 4 == x.numel(), "any"),
]


@pytest.mark.parametrize(("looks", "limit"), LOOKS)
def test_branches_on_a_size_limit_the_size(looks: Callable[[Tensor], bool], limit: str) -> None:
    x = static.data("x", [None, 4])
    _ = x * 2 if looks(x) else x * 3
    assert str(static.default_main_program().feeds["x"].limits[0]) == limit


def test_sizes_that_take_another_branch_are_refused() -> None:
    x = static.data("x", [None, 4])
    y = x * 2 if x.shape[0] > 5 else x * 3
    executor = static.Executor()
    executor.run(static.default_startup_program())
    assert executor.run(feed={"x": torch.ones(6, 4)}, fetch_list=[y])[0].sum() == 48
    with refuses(ConfigError, "feed 'x': got 2 in dimension 0, expected at least 6", "branched"):
        executor.run(feed={"x": torch.ones(2, 4)}, fetch_list=[y])


@pytest.mark.parametrize("looks", [len, lambda x: bool(x.shape[0] % 2 == 0), list])
def test_reading_a_dynamic_size_as_a_number_is_refused(looks: Callable[[Tensor], object]) -> None:
    x = static.data("x", [None, 4])
    looks(x)
    with refuses(PlanError, "'x': dimension 0 is dynamic", "by len()", "give it in static.data"):
        str(static.default_main_program())


def test_a_branch_on_parity_fixes_the_captured_size() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.layer(x[:, 0])
            return out if x.shape[0] % 2 == 0 else -out

    program = kinds.captured(kinds.of(Odd))
    assert [str(feed) for feed in program.feeds.values()] == ["x: float64[6, 3, 4]", "y: int64[6]"]
    with pytest.raises(ConfigError, match=r"got the shape \[3, 3, 4\], expected \[6, 3, 4\]"):
        static.Executor().run(program, kinds.batch(1))


@pytest.mark.slow
def test_batch_norm_needs_more_than_one_record() -> None:
    """As in eager mode; guards of torch's kernels are dropped, since they work for all sizes."""
    program = kinds.captured(kinds.of(kinds.Repeats))
    with pytest.raises(ConfigError, match="got 1 in dimension 0, expected other than 1"):
        static.Executor().run(program, kinds.batch(0, 1))
    for name in ("encoder", "lstm", "in place"):
        program = kinds.captured(kinds.of(kinds.KINDS[name]))
        static.Executor().run(program, kinds.batch(0, 1))


def test_limits_intersect() -> None:
    both = Limit(2, None, frozenset({1, 5})).within(Limit(0, 9))
    assert both == Limit(2, 9, frozenset({5}))
    assert [size for size in range(12) if both.allows(size)] == [2, 3, 4, 6, 7, 8, 9]
    assert str(both) == "at least 2 and at most 9 and other than 5"
    assert str(Limit()) == "any"


@pytest.mark.slow
def test_passes_add_no_guards() -> None:
    """A new guard would rebuild the form and lose the state of the passes."""
    program = kinds.captured(kinds.of(kinds.KINDS["encoder"]))
    before = [str(feed.limits) for feed in program.feeds.values()]
    program.passes = (passes.Amp("bfloat16"), passes.GradientMerge(2))
    form = program.form
    assert program.form is form
    assert [str(feed.limits) for feed in program.feeds.values()] == before
