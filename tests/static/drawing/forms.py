# SPDX-License-Identifier: Apache-2.0
"""Artificial forms whose operations name the modules they belong to."""

import operator
from collections.abc import Sequence

import torch
from torch import fx, nn

from fleetlight.static.graph.feeds import Feed
from fleetlight.static.graph.form import Form
from fleetlight.static.graph.state import Slot
from fleetlight.static.ops.marks import GRADIENT
from fleetlight.static.ops.reductions import REDUCE, REDUCED

_aten = torch.ops.aten
VALUE = torch.empty(4, 3)


def form_of(
    paths: Sequence[str], skips: Sequence[tuple[int, int]] = (), buckets: Sequence[int] = ()
) -> Form:
    """One operation with a parameter for each path; `skips` adds reads of earlier operations.

    `buckets` counts the gradients of each bucket, reduced as soon as all are computed.
    """
    graph, state, nodes = fx.Graph(), [], []
    weights = [_input(graph, f"p_{n}") for n in range(len(paths))]
    state = [Slot("parameter", f"{n}.weight", nn.Parameter(VALUE)) for n in range(len(paths))]
    now = first = _input(graph, "x")
    for number, path in enumerate(paths):
        now = _call(graph, _aten.mul.Tensor, (now, weights[number]), "forward", path)
        for source, target in skips:
            if target == number and source < number:
                now = _call(graph, _aten.add.Tensor, (now, nodes[source]), "forward", path)
        nodes.append(now)
    for number, gradient in _backward(graph, paths, nodes, list(buckets)).items():
        mark = _call(graph, GRADIENT, (gradient, state[number].name), "backward", "")
        _call(graph, _aten.sub_.Tensor, (weights[number], mark), "update", "")
    assert first.op == "placeholder"
    return Form(graph, tuple(state), (Feed("x", (None, 3), torch.float32),), {"output": now.name})


def _backward(
    graph: fx.Graph, paths: Sequence[str], nodes: Sequence[fx.Node], buckets: list[int]
) -> dict[int, fx.Node]:
    now, gradients, pending, reducing = nodes[-1], {}, [], []
    for number in reversed(range(len(paths))):
        now = _call(graph, _aten.mul.Tensor, (now, nodes[number]), "backward", paths[number])
        gradients[number] = now
        pending.append(number)
        if buckets and len(pending) >= buckets[0]:
            del buckets[0]
            rows = [gradients[n] for n in pending]
            bucket = _call(graph, _aten.cat.default, (rows,), "backward", "")
            _call(graph, REDUCE, (bucket, len(reducing)), "backward", "", None)
            reducing.append((bucket, pending))
            pending = []
    for index, (bucket, numbers) in enumerate(reducing):
        _call(graph, REDUCED, (bucket, index), "backward", "", None)
        parts = _call(graph, _aten.split.Tensor, (bucket, 1), "backward", "")
        for place, n in enumerate(numbers):
            gradients[n] = _call(graph, operator.getitem, (parts, place), "backward", "")
    return gradients


def _input(graph: fx.Graph, name: str) -> fx.Node:
    node = graph.placeholder(name)
    node.meta["val"] = VALUE
    return node


def _call(
    graph: fx.Graph,
    target: object,
    args: tuple[object, ...],
    part: str,
    path: str,
    value: object = VALUE,
) -> fx.Node:
    node = graph.call_function(target, args)  # type: ignore[arg-type]
    node.meta.update(part=part, module=path, val=value)
    return node
