# SPDX-License-Identifier: Apache-2.0
"""Sizes that are known when a program runs: all are computed from those of its feeds.

As it is written down, a size is asked of the tensor at hand. So that tensor, or what has only its
size in common with what is wanted, would have to be computed and kept.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import sympy
import torch
from torch import SymInt, Tensor, fx

_SIZE = torch.ops.aten.sym_size.int
_OPERATORS = {sympy.Add: operator.add, sympy.Mul: operator.mul}


def from_feeds(graph: fx.Graph, feeds: Sequence[fx.Node]) -> None:
    """Have all sizes computed from those of the feeds, as far as they are sums and products."""
    sizes = _Sizes(graph, feeds)
    for node in list(graph.nodes):
        value = node.meta.get("val")
        if node.op == "call_function" and isinstance(value, SymInt):
            same = sizes.node_of(value.node.expr, node)
            if isinstance(same, fx.Node):
                node.replace_all_uses_with(same)
                graph.erase_node(node)


class _Sizes:
    """The nodes that compute sizes, by what they compute."""

    def __init__(self, graph: fx.Graph, feeds: Sequence[fx.Node]) -> None:
        self._graph = graph
        #: where the sizes of feeds are, and the nodes that are there for sizes
        self._origins: dict[Any, tuple[fx.Node, int]] = {}
        self._nodes: dict[Any, fx.Node] = {}
        for feed in feeds:
            value = feed.meta.get("val")
            for dim, size in enumerate(value.shape if isinstance(value, Tensor) else ()):
                if isinstance(size, SymInt):
                    self._origins.setdefault(size.node.expr, (feed, dim))

    def node_of(self, expression: Any, like: fx.Node) -> fx.Node | int | None:
        """The node that computes a size; a new one stands before `like`, for which it is."""
        if expression.is_Integer:
            return int(expression)
        if expression not in self._nodes:
            with self._graph.inserting_before(like):
                found = self._made(expression, like)
            if found is None:
                return None
            self._nodes[expression] = found
        return self._nodes[expression]

    def _made(self, expression: Any, like: fx.Node) -> fx.Node | None:
        if expression in self._origins:
            feed, dim = self._origins[expression]
            return self._node(_SIZE, (feed, dim), feed.meta["val"].shape[dim], like)
        operation = _OPERATORS.get(expression.func)
        parts = [self.node_of(part, like) for part in expression.args] if operation else [None]
        if operation is None or None in parts:
            return None
        node = parts[0]
        for part in parts[1:]:
            value = operation(_value(node), _value(part))
            node = self._node(operation, (node, part), value, like)
        return node if isinstance(node, fx.Node) else None

    def _node(self, target: Any, args: Any, value: Any, like: fx.Node) -> fx.Node:
        node = self._graph.call_function(target, args)
        node.meta.update({**like.meta, "val": value})
        return node


def _value(part: Any) -> Any:
    return part.meta["val"] if isinstance(part, fx.Node) else part
