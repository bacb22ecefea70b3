# SPDX-License-Identifier: Apache-2.0
"""New operations in a graph, with all that passes want to know of a node."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx


class Pen:
    """Writes operations where the graph inserts now, of the same part and module as a node."""

    def __init__(self, like: fx.Node) -> None:
        self._graph = like.graph
        self._meta = {key: like.meta.get(key) for key in ("part", "module", "calls")}

    def write(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        """A node, with the shape of what it will compute."""
        name = getattr(target, "overloadpacket", target).__name__
        node = self._graph.create_node("call_function", target, args, kwargs, name)
        node.meta.update(self._meta)
        given, named = fx.map_arg((args, kwargs), lambda source: source.meta["val"])
        with torch.no_grad():
            node.meta["val"] = target(*given, **named)
        return node
