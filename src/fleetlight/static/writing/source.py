# SPDX-License-Identifier: Apache-2.0
"""The form of a program before any pass: the recorder's graph in order, sizes from feeds."""

from __future__ import annotations

import contextlib
import gc
import operator
from collections.abc import Iterator, Sequence
from typing import Any

import sympy
import torch
from torch import SymInt, Tensor, fx

from fleetlight.static.graph.form import Form
from fleetlight.static.graph.state import KINDS, Slot
from fleetlight.static.writing import tables
from fleetlight.static.writing.calls import CalledModules
from fleetlight.static.writing.recorder import Recorder
from fleetlight.torch_compat.tracing import rename


class ProgramSource:
    """The recorder of a program, and its modules."""

    def __init__(self) -> None:
        self.recorder = Recorder()
        self.modules = CalledModules(self.recorder)

    @property
    def version(self) -> object:
        """A value that changes with each recorded node or guard."""
        return self.recorder.version, len(self.recorder.shapes.found)

    def form(self) -> Form:
        """The graph with its inputs first: the state by kinds, then the feeds."""
        recorder = self.recorder
        entries = sorted(recorder.entries.values(), key=lambda e: KINDS.index(e.slot.kind))
        self.modules.name_state(self.modules.root)
        graph, nodes = fx.Graph(), {}
        for node in [e.node for e in entries] + [node for *_, node in recorder.feeds.values()]:
            nodes[node] = graph.node_copy(node)
        for entry in entries:
            _rename(nodes[entry.node], entry.slot)
        for node in recorder.graph.nodes:
            if node.op != "placeholder":
                nodes[node] = graph.node_copy(node, lambda n: nodes[n])
        from_feeds(graph, [nodes[node] for *_, node in recorder.feeds.values()])
        names = {name: nodes[node].name for name, node in recorder.names.items()}
        state = tuple(entry.slot for entry in entries)
        lookups = tables.named(recorder.lookups, self.modules.root)
        return Form(graph, state, tuple(recorder.constrained_feeds()), names, lookups=lookups)


def _rename(node: fx.Node, slot: Slot) -> None:
    """Name an input after its slot."""
    plain = f"{slot.name}_{slot.kind}" if slot.kind in ("rate", "weight") else slot.name
    rename(node, "".join(c if c.isalnum() else "_" for c in f"p_{plain}"))


@contextlib.contextmanager
def no_gc() -> Iterator[None]:
    """Inside the block garbage collection is off; it takes a quarter of the time of a capture."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


_SIZE = torch.ops.aten.sym_size.int
_OPERATORS = {sympy.Add: operator.add, sympy.Mul: operator.mul}


def from_feeds(graph: fx.Graph, feeds: Sequence[fx.Node]) -> None:
    """Compute all sizes that are sums and products of feed sizes from the feeds."""
    sizes = _OpenSizes(graph, feeds)
    for node in list(graph.nodes):
        value = node.meta.get("val")
        if node.op == "call_function" and isinstance(value, SymInt):
            same = sizes.node_of(value.node.expr, node)
            if isinstance(same, fx.Node):
                node.replace_all_uses_with(same)
                graph.erase_node(node)


class _OpenSizes:
    """The nodes that compute sizes, by expression."""

    def __init__(self, graph: fx.Graph, feeds: Sequence[fx.Node]) -> None:
        self._graph = graph
        #: the feed and dimension of each size, and the nodes of sizes so far
        self._origins: dict[Any, tuple[fx.Node, int]] = {}
        self._nodes: dict[Any, fx.Node] = {}
        for feed in feeds:
            value = feed.meta.get("val")
            for dim, size in enumerate(value.shape if isinstance(value, Tensor) else ()):
                if isinstance(size, SymInt):
                    self._origins.setdefault(size.node.expr, (feed, dim))

    def node_of(self, expression: Any, like: fx.Node) -> fx.Node | int | None:
        """The node that computes a size; a new one comes before `like`."""
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
