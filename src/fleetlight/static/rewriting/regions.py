# SPDX-License-Identifier: Apache-2.0
"""The values of a region that can be computed a second time with the same result."""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from fleetlight.static.graph.aliases import base_of, changed_by
from fleetlight.static.graph.form import in_forward
from fleetlight.static.ops.marks import UNLESS_TESTING

_aten = torch.ops.aten
#: in training they change their statistics without reading them
_BATCH_NORMS = (_aten.native_batch_norm.default, _aten.cudnn_batch_norm.default)
#: arguments: the statistics, and whether they train
_STATISTICS, _TRAINS = slice(3, 5), 5


#: by the base of a piece of memory, the nodes that change it before the update
Changers = Mapping[fx.Node, Sequence[fx.Node]]


def changers_of(graph: fx.Graph) -> Changers:
    """The changers of all memory in a graph."""
    changers: dict[fx.Node, list[fx.Node]] = defaultdict(list)
    for node in graph.nodes:
        if node.meta.get("part") not in ("reduction", "update"):
            for base in {base_of(changed) for changed in _changed(node)}:
                changers[base].append(node)
    return changers


class Region:
    """A part of the forward, and its backward."""

    def __init__(self, members: Sequence[fx.Node], changers: Changers) -> None:
        self.forward = [node for node in members if node.meta["part"] == "forward"]
        self.backward = [node for node in members if node.meta["part"] == "backward"]
        self._changers = changers
        #: values that other nodes outside the forward need; they are kept anyway
        self.shared = self._shared()
        self.repeatable = self._repeatable()

    def needed(self) -> list[fx.Node]:
        """The nodes to compute again for this backward, in their first order."""
        found: set[fx.Node] = set()
        pending = [n for user in self.backward for n in user.all_input_nodes]
        while pending:
            node = pending.pop()
            if node in self.repeatable and node not in found:
                found.add(node)
                # and the nodes that change it in place
                pending += [*read_by(node), *self._changers.get(base_of(node), ()), base_of(node)]
        return [node for node in self.forward if node in found]

    def kept(self, needed: Iterable[fx.Node]) -> set[fx.Node]:
        """Values kept from the forward, since a second computation would differ."""
        mine = set(self.forward) - self.shared - self.repeatable
        read = [n for node in (*needed, *self.backward) for n in read_by(node)]
        return {base_of(n) for n in read if n in mine and isinstance(n.meta.get("val"), Tensor)}

    def _shared(self) -> set[fx.Node]:
        backward, shared = set(self.backward), set[fx.Node]()
        for node in self.forward:
            others = (u for u in node.users if u not in backward)
            if not all(map(in_forward, others)):
                shared |= {node, base_of(node)}
        return shared

    def _repeatable(self) -> set[fx.Node]:
        can = {node for node in self.forward if _is_pure(node)} - self.shared
        while lost := {node for node in can if not self._is_repeatable(node, can)}:
            can -= lost
        return can

    def _is_repeatable(self, node: fx.Node, can: Collection[fx.Node]) -> bool:
        """Whether a node has the same result if exactly the nodes in `can` are computed again."""
        if any(base_of(changed) not in can for changed in _changed(node)):
            return False
        if base_of(node) is node and any(n not in can for n in self._changers.get(node, ())):
            return False
        for source in read_by(node):
            if node.target is operator.getitem and source not in can:
                # one of several results: this one is kept
                return False
            base = base_of(source)
            if base not in can and any(node < n for n in self._changers.get(base, ())):
                return False
        return True


def read_by(node: fx.Node) -> list[fx.Node]:
    """The inputs that a node needs when it is computed again."""
    if node.target is UNLESS_TESTING:
        return node.all_input_nodes[:1]
    if is_training_norm(node):
        return [n for n in node.args[: _STATISTICS.start] if isinstance(n, fx.Node)]
    return node.all_input_nodes


def is_training_norm(node: fx.Node) -> bool:
    """Whether a node is a batch norm in training."""
    return node.target in _BATCH_NORMS and bool(node.args[_TRAINS])


def without_statistics(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments of a batch norm without running statistics."""
    return (*args[: _STATISTICS.start], None, None, *args[_STATISTICS.stop :])


def _is_pure(node: fx.Node) -> bool:
    """Whether a node returns tensors and draws no random numbers."""
    made = node.meta.get("val")
    tags = getattr(node.target, "tags", ())
    return isinstance(made, (Tensor, tuple, list)) and (
        torch.Tag.nondeterministic_seeded not in tags
    )


def _changed(node: fx.Node) -> Iterator[fx.Node]:
    """The inputs that a node changes when it is computed again."""
    if node.target not in _BATCH_NORMS:
        yield from changed_by(node)
