# SPDX-License-Identifier: Apache-2.0
"""Which values share memory, and therefore keep their order."""

import operator

import pytest
import torch
from torch import fx

from fleetlight.static.graph.aliases import Memory, base_of, changed_by, is_view, looked_at
from fleetlight.static.ops.marks import GRADIENT, LAID_OUT

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
