# SPDX-License-Identifier: Apache-2.0
"""Segments to compile: operations between those that stay calls."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from fleetlight.static.coding.buckets import is_bucket
from fleetlight.static.graph.aliases import is_view
from fleetlight.static.ops.marks import LAID_OUT
from fleetlight.torch_compat.operators import OpOverload

#: fewer operations than these run faster as calls
_MIN_OPERATIONS = 2


@dataclasses.dataclass
class GraphSegment:
    """Consecutive nodes, their inputs, and those of them that later nodes use."""

    nodes: list[fx.Node]

    def __post_init__(self) -> None:
        self.own = frozenset(self.nodes)
        taken = (i for node in self.nodes for i in node.all_input_nodes)
        self.inputs = list(dict.fromkeys(node for node in taken if node not in self.own))
        self.outputs = [n for n in self.nodes if any(u not in self.own for u in n.users)]

    def graph(self) -> fx.Graph:
        """The segment as a graph of its own."""
        graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
        for node in self.inputs:
            copies[node] = graph.placeholder(node.name)
        for node in self.nodes:
            copies[node] = graph.node_copy(node, lambda n: copies[n])
        graph.output([copies[node] for node in self.outputs])
        return graph


def segments(graph: fx.Graph) -> Iterator[GraphSegment]:
    """The segments of a graph, in order."""
    _bring_together(graph)
    run: list[fx.Node] = []
    for node in list(graph.nodes):
        if node.op == "call_function" and not stays(node):
            run.append(node)
        elif node.op != "placeholder" and run:
            yield from _worth_it(run)
            run = []


def _bring_together(graph: fx.Graph) -> None:
    """Move each `getitem` after its source, and each layout before its first user."""
    for node in list(graph.nodes):
        if node.target is operator.getitem and isinstance(node.args[0], fx.Node):
            node.args[0].append(node)
        elif node.target is LAID_OUT:
            min(node.users).prepend(node)


def stays(node: fx.Node) -> bool:
    """Whether a node stays a call: communication, fused steps, and random numbers.

    Random numbers are then those of eager training. (inductor would call the same operations, but
    reads their in-place results too early.)
    """
    target: Any = node.target
    if target is operator.getitem:
        return stays(node.all_input_nodes[0])
    if not isinstance(target, OpOverload):
        return False
    if torch.Tag.nondeterministic_seeded in target.tags:
        return True
    if target.namespace == "aten":
        return str(target.overloadpacket.__name__).startswith("_fused_") or is_bucket(node)
    return bool(target.namespace != "prims")


def _worth_it(run: list[fx.Node]) -> Iterator[GraphSegment]:
    """The segment of a run, if it is long enough; views without users in it move after it."""
    inside = set(run)
    for node in reversed(run):
        if is_view(node) and not any(user in inside for user in node.users):
            inside.discard(node)
    nodes = [node for node in run if node in inside]
    if sum(not is_view(node) for node in nodes) >= _MIN_OPERATIONS:
        last = nodes[-1]
        for node in run:
            if node not in inside:
                last.append(node)
                last = node
        yield GraphSegment(nodes)
