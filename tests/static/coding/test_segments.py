# SPDX-License-Identifier: Apache-2.0
"""Which nodes are compiled together, and which remain calls."""

import operator
from typing import Any

import torch
from torch import fx

from fleetlight.static.coding.inductor import GraphSegment, segments, stays
from fleetlight.static.ops.marks import LAID_OUT
from fleetlight.static.ops.reductions import REDUCE, REDUCED

aten: Any = torch.ops.aten


def step() -> fx.Graph:
    """Two gradients reduced together, and a fused optimizer step."""
    graph = fx.Graph()
    x, parameter, rate = (graph.placeholder(name) for name in ("x", "parameter", "rate"))
    first = graph.call_function(aten.mul.Tensor, (x, parameter))
    pair = graph.call_function(aten.max.dim, (first, 0))
    flat = graph.call_function(aten.view.default, (first, [-1]))
    second = graph.call_function(aten.exp.default, (first,))
    largest = graph.call_function(operator.getitem, (pair, 0))
    rows = [flat, graph.call_function(aten.view.default, (second, [-1]))]
    bucket = graph.call_function(aten.cat.default, (rows,))
    graph.call_function(REDUCE, (bucket, 0))
    graph.call_function(REDUCED, (bucket, 0))
    half = graph.call_function(aten.mul.Tensor, (second, 0.5))
    laid = graph.call_function(LAID_OUT, (half, parameter))
    more = graph.call_function(aten.add.Tensor, (half, largest))
    options = {"lr": rate, "weight_decay": 0.0, "momentum": 0.0, "dampening": 0.0}
    options |= {"nesterov": False, "maximize": False, "is_first_step": False}
    graph.call_function(aten._fused_sgd_.tensor_lr, ([parameter], [laid], []), options)
    graph.output([more, bucket])
    return graph


def names(segment: GraphSegment) -> list[str]:
    return [node.name for node in segment.nodes]


def test_segments_end_at_calls_that_are_not_compiled() -> None:
    graph = step()
    first, second = segments(graph)
    graph.lint()
    assert names(first) == ["mul_tensor", "max_dim", "getitem", "exp_default"]
    assert names(second) == ["mul_tensor_1", "add_tensor"]
    staying = {node.name for node in graph.nodes if node.op == "call_function" and stays(node)}
    assert staying >= {"cat_default", "reduce_default", "reduced_default", "laid_out_default"}
    assert any("fused_sgd" in name for name in staying)


def test_segments_know_their_inputs_and_outputs() -> None:
    first, second = segments(step())
    assert [node.name for node in first.inputs] == ["x", "parameter"]
    assert [node.name for node in first.outputs] == ["mul_tensor", "getitem", "exp_default"]
    assert [node.name for node in second.inputs] == ["exp_default", "getitem"]
    own = second.graph()
    own.lint()
    assert [node.op for node in own.nodes].count("placeholder") == 2


def test_views_used_only_outside_move_after_the_segment() -> None:
    graph = step()
    first, _ = segments(graph)
    order = [node.name for node in graph.nodes]
    last = order.index(first.nodes[-1].name)
    assert order[last + 1 : last + 4] == ["view_default", "view_default_1", "cat_default"]


def test_a_lone_operation_is_not_compiled() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output(
        graph.call_function(aten.exp.default, (graph.call_function(aten.t.default, (x,)),))
    )
    assert list(segments(graph)) == []
