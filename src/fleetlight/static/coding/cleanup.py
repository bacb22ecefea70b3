# SPDX-License-Identifier: Apache-2.0
"""Removal of redundant operations: autograd's aliases, views of views."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

_aten: Any = torch.ops.aten
#: views equal to their input
_SAME = (_aten.detach.default, _aten.alias.default)
#: views that their arguments determine completely
_VIEWS = (_aten.t.default, _aten.transpose.int, _aten.permute.default, _aten.view.default)


def clean(graph: fx.Graph) -> None:
    """Remove redundant operations."""
    views: dict[Any, fx.Node] = {}
    for node in list(graph.nodes):
        same = _same_as(node, views)
        if same is not None:
            node.replace_all_uses_with(same)
            graph.erase_node(node)
        elif node.target is _aten.view.default:
            _reduce_without(graph, node)


def _same_as(node: fx.Node, views: dict[Any, fx.Node]) -> fx.Node | None:
    """An earlier node with the same values in the same memory."""
    if node.target in _SAME:
        return node.all_input_nodes[0]
    if node.target not in _VIEWS:
        return None
    of = node.all_input_nodes[0]
    if node.target is _aten.t.default and of.target is _aten.t.default:
        return of.all_input_nodes[0]
    if node.target is _aten.view.default and _shape(node) == _shape(of) is not None:
        return of
    key = (node.target, repr(node.args))
    return None if views.setdefault(key, node) is node else views[key]


def _shape(node: fx.Node) -> list[Any] | None:
    """The sizes if all are numbers."""
    value = node.meta.get("val")
    if not isinstance(value, Tensor) or not all(isinstance(size, int) for size in value.shape):
        return None
    return list(value.shape)


def _reduce_without(graph: fx.Graph, node: fx.Node) -> None:
    """Replace a sum with `keepdim` and the view that drops the dimensions by a plain sum."""
    total: Any = node.args[0]
    if total.target is not _aten.sum.dim_IntList or len(total.users) > 1 or _shape(node) is None:
        return
    value, dims, keeps = (*total.args, False)[:3]
    full = _shape(total)
    if not keeps or full is None:
        return
    summed = {dim % len(full) for dim in dims}
    if [size for dim, size in enumerate(full) if dim not in summed] != _shape(node):
        return
    total.args = (value, dims)
    node.replace_all_uses_with(total)
    graph.erase_node(node)
