# SPDX-License-Identifier: Apache-2.0
"""Cleaning a graph changes no result and keeps every effect."""

from typing import Any

import pytest
import torch
from tests.static.nets import batch, captured, net
from torch import Tensor, fx

from fleetlight.static.coding.cleanup import clean
from fleetlight.static.graph.form import drop_unused, graph_of
from fleetlight.static.running.runners import EVERYTHING

pytestmark = pytest.mark.slow

aten: Any = torch.ops.aten


def cleaned(graph: fx.Graph) -> fx.Graph:
    clean(graph)
    drop_unused(graph)
    graph.lint()
    return graph


def names(graph: fx.Graph) -> list[str]:
    """The operations, in order."""
    return [
        node.target.overloadpacket.__name__  # type: ignore[union-attr]
        for node in graph.nodes
        if isinstance(node.target, torch._ops.OpOverload)
    ]


def run(graph: fx.Graph, *inputs: Tensor) -> Any:
    return fx.Interpreter(fx.GraphModule({}, graph)).run(*inputs)


def test_cleaning_a_training_step_removes_only_redundant_nodes() -> None:
    model = net()
    program = captured(model, torch.optim.SGD(model.parameters(), lr=0.1))
    wanted = ["loss", "output", *(n.name for n in program.form.graph.nodes if "mm" in n.name)]
    full = fx.GraphModule({}, graph_of(program.form, wanted, ("forward", "backward")))
    less = cleaned(graph_of(program.form, wanted, ("forward", "backward")))
    assert not {"detach", "alias"} & set(names(less))
    assert len(less.nodes) < len(full.graph.nodes)
    inputs = [*(slot.tensor.detach() for slot in program.state), *batch(0).values()]
    with torch.no_grad():
        torch.manual_seed(0)
        expected = full(*(tensor.clone() for tensor in inputs))
        torch.manual_seed(0)
        found = run(less, *(tensor.clone() for tensor in inputs))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_every_fetch_is_kept() -> None:
    model = net()
    program = captured(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for node in program.form.graph.nodes:
        if isinstance(node.meta.get("val"), Tensor):
            graph = cleaned(graph_of(program.form, [node.name], EVERYTHING))
            assert len(graph.output_node().args[0]) == 1  # type: ignore[arg-type]


def chain(*steps: tuple[Any, ...], shape: tuple[int, ...] = (3, 4)) -> fx.Graph:
    """Each step takes the value of the step before; the graph returns the last."""
    graph = fx.Graph()
    node = graph.placeholder("x")
    value = torch.zeros(shape)
    for operation, *args in steps:
        node, value = graph.call_function(operation, (node, *args)), operation(value, *args)
        node.meta["val"] = value
    graph.output(node)
    return graph


SAME: list[tuple[list[tuple[Any, ...]], list[str]]] = [
    ([(aten.t.default,), (aten.t.default,)], []),
    ([(aten.t.default,)] * 3, ["t"]),
    ([(aten.neg.default,), (aten.detach.default,), (aten.alias.default,)], ["neg"]),
    ([(aten.neg.default,), (aten.view.default, [3, 4])], ["neg"]),
    ([(aten.neg.default,), (aten.view.default, [4, 3])], ["neg", "view"]),
    ([(aten.sum.dim_IntList, [0], True), (aten.view.default, [4])], ["sum"]),
    ([(aten.sum.dim_IntList, [-1], True), (aten.view.default, [3])], ["sum"]),
    ([(aten.sum.dim_IntList, [0], True), (aten.view.default, [2, 2])], ["sum", "view"]),
    ([(aten.sum.dim_IntList, [0]), (aten.view.default, [4, 1])], ["sum", "view"]),
]


def test_short_chains_are_simplified() -> None:
    x = torch.rand(3, 4)
    for steps, left in SAME:
        expected = x
        for operation, *args in steps:
            expected = operation(expected, *args)
        graph = cleaned(chain(*steps))
        assert names(graph) == left, steps
        torch.testing.assert_close(run(graph, x), expected, rtol=0, atol=0)


def test_a_sum_with_other_users_keeps_its_dimensions() -> None:
    graph = fx.Graph()
    total = graph.call_function(aten.sum.dim_IntList, (graph.placeholder("x"), [0], True))
    total.meta["val"] = torch.zeros(1, 4)
    flat = graph.call_function(aten.view.default, (total, [4]))
    flat.meta["val"] = torch.zeros(4)
    graph.output([total, flat])
    assert [tuple(value.shape) for value in run(cleaned(graph), torch.rand(3, 4))] == [(1, 4), (4,)]


def test_views_of_a_changed_tensor_see_the_change() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    before = graph.call_function(aten.t.default, (x,))
    graph.call_function(aten.add_.Tensor, (x, 1))
    after = graph.call_function(aten.t.default, (x,))
    graph.output([before, after])
    assert names(cleaned(graph)) == ["t", "add_"]
    assert [value.tolist() for value in run(graph, torch.zeros(2, 3))] == [[[1.0, 1.0]] * 3] * 2
