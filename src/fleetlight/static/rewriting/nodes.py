# SPDX-License-Identifier: Apache-2.0
"""Nodes for passes: new operations with the metadata of a node, and the marks of gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from fleetlight.static.graph.aliases import base_of
from fleetlight.static.ops.marks import GRADIENT


class NodeWriter:
    """Writes operations at the graph's insertion point, with the part and module of a node."""

    def __init__(self, like: fx.Node) -> None:
        self._graph = like.graph
        self._meta = {key: like.meta.get(key) for key in ("part", "module", "calls")}

    def write(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        """Create a node with a fake value."""
        name = getattr(target, "overloadpacket", target).__name__
        node = self._graph.create_node("call_function", target, args, kwargs, name)
        node.meta.update(self._meta)
        given, named = fx.map_arg((args, kwargs), lambda source: source.meta["val"])
        with torch.no_grad():
            node.meta["val"] = target(*given, **named)
        return node


def gradients_of(graph: fx.Graph) -> list[fx.Node]:
    """The marks of gradients, in the order of backward."""
    order = {node: place for place, node in enumerate(graph.nodes)}
    marks = [node for node in graph.nodes if node.target is GRADIENT]
    return sorted(marks, key=lambda mark: order[base_of(made_by(mark))])


def made_by(mark: fx.Node) -> fx.Node:
    """The node whose value is marked."""
    made = mark.args[0]
    assert isinstance(made, fx.Node)
    return made
