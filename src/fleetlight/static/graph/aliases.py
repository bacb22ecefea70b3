# SPDX-License-Identifier: Apache-2.0
"""Which nodes of a graph share memory: the basis for moving an operation."""

from __future__ import annotations

import functools
import operator
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from fleetlight.static.ops.marks import LAID_OUT
from fleetlight.torch_compat.operators import UNSAFE_VIEW, OpOverload, schema

_aten = torch.ops.aten
#: views of their first argument, though their schemas do not say so
_SILENT_VIEWS = (
    UNSAFE_VIEW,
    _aten.unsafe_split.Tensor,
    _aten.unsafe_split_with_sizes.default,
    _aten.unsafe_chunk.default,
    LAID_OUT,
)
#: arguments that batch norm changes, though its schema does not say so
_STATISTICS = ((3, "running_mean", True), (4, "running_var", True))


def looked_at(node: fx.Node) -> fx.Node | None:
    """The input whose memory a node's value shares, or None."""
    if node.target is operator.getitem:
        source = node.args[0]
        return looked_at(source) if isinstance(source, fx.Node) else None
    if node.target in _SILENT_VIEWS:
        return node.all_input_nodes[0]
    if not _returns_its_input(node.target):
        return None
    shared = (value for value, _ in _shared(node) if isinstance(value, fx.Node))
    return next(shared, None)


def base_of(node: fx.Node) -> fx.Node:
    """The node that allocated the memory of a value."""
    while (source := looked_at(node)) is not None:
        node = source
    return node


def is_view(node: fx.Node) -> bool:
    """Whether a node is a pure view."""
    return looked_at(node) is not None and node.target is not LAID_OUT and not any(changed_by(node))


def changed_by(node: fx.Node) -> Iterator[fx.Node]:
    """The inputs that a node changes in place."""
    for value, is_changed in _shared(node):
        values = value if isinstance(value, (list, tuple)) else (value,)
        yield from (v for v in values if is_changed and isinstance(v, fx.Node))


def written_to(func: Any, args: Sequence[Any]) -> Iterator[Tensor]:
    """The tensors that a call with these arguments changes in place."""
    for place, _, is_changed in _places(func):
        value = args[place] if is_changed and place < len(args) else None
        yield from (
            v
            for v in (value if isinstance(value, (list, tuple)) else [value])
            if isinstance(v, Tensor)
        )


class Memory:
    """The nodes that must stay before, and those that must stay after a node."""

    def __init__(self, graph: fx.Graph) -> None:
        self._users: dict[fx.Node, list[fx.Node]] = defaultdict(list)
        self._changers: dict[fx.Node, list[fx.Node]] = defaultdict(list)
        for node in graph.nodes:
            for base in {base_of(source) for source in node.all_input_nodes}:
                self._users[base].append(node)
            for base in {base_of(changed) for changed in changed_by(node)}:
                self._changers[base].append(node)

    def before(self, node: fx.Node) -> set[fx.Node]:
        """Its inputs, and earlier nodes with memory that either of them changes."""
        return {*node.all_input_nodes, *(n for n in self._conflicts(node) if n < node)}

    def after(self, node: fx.Node) -> set[fx.Node]:
        """Its users, and later nodes with memory that either of them changes."""
        return {*node.users, *(n for n in self._conflicts(node) if node < n)}

    def _conflicts(self, node: fx.Node) -> Iterator[fx.Node]:
        for source in node.all_input_nodes:
            yield from self._changers[base_of(source)]
        for changed in changed_by(node):
            yield from self._users[base_of(changed)]


def _shared(node: fx.Node) -> Iterator[tuple[Any, bool]]:
    """The arguments that an operation may return or change, and whether it changes them."""
    for place, name, is_changed in _places(node.target):
        if place < len(node.args):
            yield node.args[place], is_changed
        elif name in node.kwargs:
            yield node.kwargs[name], is_changed


@functools.cache
def _places(target: Any) -> tuple[tuple[int, str, bool], ...]:
    if not isinstance(target, OpOverload):
        return ()
    if target.overloadpacket is _aten.native_batch_norm:
        return _STATISTICS
    return tuple(
        (place, argument.name, argument.alias_info.is_write)
        for place, argument in enumerate(schema(target).arguments)
        if argument.alias_info is not None
    )


@functools.cache
def _returns_its_input(target: Any) -> bool:
    if not isinstance(target, OpOverload):
        return False
    returns = schema(target).returns
    return bool(returns) and returns[0].alias_info is not None
