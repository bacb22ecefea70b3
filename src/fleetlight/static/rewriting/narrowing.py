# SPDX-License-Identifier: Apache-2.0
"""Rewrites products to compute in a narrow type."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch import Tensor, fx

from fleetlight.static.graph.aliases import base_of, changed_by
from fleetlight.static.rewriting.nodes import NodeWriter
from fleetlight.torch_compat.operators import CAST, UNSAFE_VIEW, OpOverload, schema
from fleetlight.torch_compat.tracing import rename

_aten = torch.ops.aten
#: operations that are much faster in a narrow type and accumulate in a wide one
_NARROW = frozenset(
    {
        *("mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "linear", "matmul"),
        *("linear_backward", "matmul_backward", "convolution", "convolution_backward"),
    }
)
_ATTENTION = "_scaled_dot_product_"
#: arguments of attention that stay wide
_WIDE = frozenset({"logsumexp"})
#: operations that only select values, so a cast may come after them
_EXACT = (_aten.relu.default, _aten.threshold_backward.default, _aten.clone.default)
#: views
_VIEWS = (
    _aten.t.default,
    _aten.transpose.int,
    _aten.permute.default,
    _aten.view.default,
    UNSAFE_VIEW,
    _aten.unsqueeze.default,
    _aten.squeeze.dim,
    _aten.expand.default,
    _aten.detach.default,
    _aten.alias.default,
)


class Narrowing:
    """Rewrites a graph, whose nodes keep their names, types and meanings.

    A narrow operation comes before the node that it replaces, which only widens its result. If
    the next operation is narrow as well, it uses the narrow result, and the cast is unused.
    """

    def __init__(self, graph: fx.Graph, dtype: torch.dtype) -> None:
        self._graph, self._dtype = graph, dtype
        #: the narrow copies of nodes that have not changed since
        self._narrow: dict[fx.Node, fx.Node] = {}
        #: nodes that are exactly their narrow copy, widened
        self._widened: set[fx.Node] = set()
        self.done = self.casts = 0

    def rewrite(self) -> None:
        """Rewrite the whole graph."""
        for node in list(self._graph.nodes):
            if is_narrowable(node):
                self._compute(node)
                self.done += 1
            elif node.target in _EXACT and all(map(self._is_exact, node.all_input_nodes)):
                self._compute(node)
            self._forget({base_of(changed) for changed in changed_by(node)})

    def _compute(self, node: fx.Node) -> None:
        """Compute a node in the narrow type; the node itself becomes the wide result."""
        pen = NodeWriter(node)
        target: Any = node.target
        names = [argument.name for argument in schema(target).arguments]
        args = [
            value if name in _WIDE else self._of(value, node)
            for name, value in zip(names, node.args, strict=False)
        ]
        kwargs = {name: self._of(value, node) for name, value in node.kwargs.items()}
        with self._graph.inserting_before(node):
            narrow = pen.write(target, *args, **kwargs)
        if isinstance(node.meta["val"], Tensor):
            self._widen(node, narrow)
            return
        # several results: one by one
        for old in list(node.users):
            with self._graph.inserting_before(old):
                new = self._graph.node_copy(old, lambda n: narrow if n is node else n)
            new.meta["val"] = narrow.meta["val"][old.args[1]]
            self._widen(old, new)
        self._graph.erase_node(node)

    def _widen(self, node: fx.Node, narrow: fx.Node) -> None:
        """Make a node the cast of its narrow result; drop it if that is wide or no tensor."""
        value = narrow.meta["val"]
        if not isinstance(value, Tensor) or value.dtype != self._dtype:
            node.replace_all_uses_with(narrow)
            self._graph.erase_node(node)
            rename(narrow, node.name)
            return
        node.target, node.args, node.kwargs = CAST, (narrow,), {"dtype": torch.float32}
        self._narrow[node] = narrow
        self._widened.add(node)

    def _of(self, value: Any, user: fx.Node) -> Any:
        """The narrow form of an argument."""
        if not isinstance(value, fx.Node) or not _is_wide(value):
            return value
        if value not in self._narrow:
            with self._graph.inserting_before(user):
                self._narrow[value] = self._made(value, user)
        return self._narrow[value]

    def _made(self, value: fx.Node, user: fx.Node) -> fx.Node:
        """Cast a value; for a view cast its base, which other views may share."""
        target: Any = value.target
        if target in _VIEWS:
            source = self._of(value.args[0], user)
            with self._graph.inserting_before(user):
                return NodeWriter(user).write(target, source, *value.args[1:], **value.kwargs)
        self.casts += 1
        return NodeWriter(user).write(CAST, value, dtype=self._dtype)

    def _is_exact(self, node: fx.Node) -> bool:
        """Whether a node is exactly a widened narrow value."""
        if node.target in _VIEWS:
            return self._is_exact(node.all_input_nodes[0])
        return node in self._widened and node in self._narrow

    def _forget(self, bases: Collection[fx.Node]) -> None:
        """Drop narrow copies of memory that changed."""
        if bases:
            self._narrow = {n: m for n, m in self._narrow.items() if base_of(n) not in bases}


def is_narrowable(node: fx.Node) -> bool:
    """Whether autocast would compute a node in a narrow type; never for double precision."""
    target: Any = node.target
    if not isinstance(target, OpOverload) or target.namespace != "aten":
        return False
    name = target.overloadpacket.__name__
    if name not in _NARROW and not name.startswith(_ATTENTION):
        return False
    made = node.meta.get("val")
    tensors = [made] if isinstance(made, Tensor) else list(made or ())
    first = next((v for v in tensors if isinstance(v, Tensor)), None)
    return first is not None and first.dtype == torch.float32 and _has_wide(node.all_input_nodes)


def _has_wide(nodes: Iterable[fx.Node]) -> bool:
    return any(map(_is_wide, nodes))


def _is_wide(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) and value.dtype == torch.float32
