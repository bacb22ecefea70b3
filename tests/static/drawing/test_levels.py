# SPDX-License-Identifier: Apache-2.0
"""Operations are grouped by module, at a depth that gives few levels."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.static.drawing.forms import form_of
from tests.static.nets import batch, captured, net
from torch import Tensor, nn

from fleetlight import static
from fleetlight.static.drawing.levels import MAX_LEVELS, carried_of, levels_of, names_of_operations

pytestmark = pytest.mark.slow

NAMES = st.lists(st.sampled_from(["a", "b", "0", "1"]), max_size=4).map(".".join)
PATHS = st.lists(NAMES, min_size=1, max_size=60)


def paths_of(form: static.Program) -> list[str]:
    return [level.path for level in levels_of(form.form.graph)]


@given(PATHS, st.integers(1, 12))
def test_every_operation_is_at_one_of_few_levels(paths: list[str], most: int) -> None:
    graph = form_of(paths).graph
    levels = levels_of(graph, most)
    assert 1 <= len(levels) <= most
    forward = [node for level in levels for node in level.forward]
    parts = [n.meta["part"] for n in graph.nodes if n.op == "call_function"]
    assert [node.meta["part"] for node in forward] == ["forward"] * parts.count("forward")
    assert forward == sorted(forward)
    backward = [node for level in levels for node in level.backward]
    carried = carried_of(graph)
    expected = [n for n in graph.nodes if n.meta.get("part") == "backward" and n not in carried]
    assert sorted(backward) == expected


def test_modules_are_split_while_levels_stay_few() -> None:
    wide = [f"layers.{n}.{part}" for n in range(20) for part in ("attention", "norm", "mlp")]
    levels = levels_of(form_of(wide).graph)
    assert [level.path for level in levels] == [f"layers.{n}" for n in range(20)]
    assert [level.path for level in levels_of(form_of(wide[:9]).graph)] == wide[:9]


def test_many_children_of_one_module_share_levels() -> None:
    levels = levels_of(form_of([f"layers.{n}" for n in range(100)]).graph)
    assert len(levels) <= MAX_LEVELS
    assert levels[0].path == "layers.0 … layers.2"


def test_without_modules_each_operation_is_a_level() -> None:
    levels = levels_of(form_of([""] * 5, skips=[(0, 3)]).graph)
    assert [len(level.forward) for level in levels] == [1] * 6


class Twice(nn.Module):
    """Calls one module twice, with another operation between."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.last = nn.Linear(8, 8).double(), nn.Linear(8, 3).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.inner(self.inner(x).relu()).tanh())


def twice() -> static.Program:
    model = Twice()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return static.capture(model, nn.functional.cross_entropy, optimizer, batch(0))


def test_backward_is_at_the_level_of_its_forward() -> None:
    """Repeated calls of one module, and operations of the module itself, remain distinct."""
    levels = levels_of(twice().form.graph)
    assert [level.path for level in levels] == ["inner", "", "inner", "", "last", ""]
    names = [[str(node.target) for node in level.backward] for level in levels]
    assert any("threshold_backward" in name for name in names[1])
    assert any("tanh_backward" in name for name in names[3])
    assert all(any("aten.mm" in name for name in names[number]) for number in (0, 2, 4))
    assert any("log_softmax_backward" in name for name in names[5])


def test_backward_of_a_loaded_program_is_at_the_same_level() -> None:
    program = twice()
    for node in program.form.graph.nodes:
        for key in ("derivative", "calls"):
            node.meta.pop(key, None)
    levels = levels_of(program.form.graph)
    assert len(levels) == 6
    names = [[str(node.target) for node in level.backward] for level in levels]
    assert any("threshold_backward" in name for name in names[1])
    assert any("tanh_backward" in name for name in names[3])


def test_operations_without_derivative_take_no_backward_from_others() -> None:
    """The counter of the batch norm directly follows the linear layer."""
    model = net()
    program = captured(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for node in program.form.graph.nodes:
        for key in ("derivative", "calls"):
            node.meta.pop(key, None)
    levels = levels_of(program.form.graph)
    assert [level.path for level in levels] == ["0", "1", "2", "3", "4", ""]
    products = [any("aten.mm" in str(n.target) for n in level.backward) for level in levels]
    assert products == [True, False, False, False, True, False]
    assert all(level.backward for level in levels)


def test_without_modules_backward_is_matched_by_derivative() -> None:
    program = static.Program()
    with static.program_guard(program):
        first, last = nn.Parameter(torch.randn(8, 4)), nn.Parameter(torch.randn(4, 1))
        x, y = static.data("x", [None, 8]), static.data("y", [None, 1])
        loss = ((torch.tanh(x @ first) @ last - y) ** 2).mean()
        static.minimize(torch.optim.SGD([first, last], lr=0.1), loss)
    levels = levels_of(program.form.graph)
    done = [next(iter(names_of_operations(level.forward))) for level in levels]
    assert done == ["mm", "tanh", "mm", "sub", "pow", "mean"]
    products = [names_of_operations(level.backward).get("mm", 0) for level in levels]
    assert products == [1, 0, 2, 0, 0, 0]
    assert "tanh_backward" in names_of_operations(levels[1].backward)
