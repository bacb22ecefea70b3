# SPDX-License-Identifier: Apache-2.0
"""`Program`: a training step or an evaluation as one graph, with the state that it works on."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from fleetlight.errors import ConfigError, did_you_mean
from fleetlight.static import text
from fleetlight.static.feeds import Feed
from fleetlight.static.state import Slot

Compiled = Callable[..., list[Tensor]]


@dataclasses.dataclass
class Program:
    """The graph's inputs are the state, then the feeds; its outputs are the fetches."""

    graph: fx.GraphModule
    state: list[Slot]
    feeds: dict[str, Feed]
    #: names of what may be fetched, in the order of the graph's outputs
    fetches: list[str]
    #: one line for each pass that has been applied
    reports: list[str] = dataclasses.field(default_factory=list)
    _compiled: dict[tuple[str, ...], Compiled] = dataclasses.field(default_factory=dict, repr=False)

    def __str__(self) -> str:
        """Every operation, a line each."""
        feeds = list(self.feeds.values())
        return text.listing(self.graph.graph, self.state, feeds, self.fetches)

    def summary(self) -> str:
        """What it takes, what it keeps, what the passes did."""
        feeds = list(self.feeds.values())
        return text.summary(self.graph.graph, self.state, feeds, self.fetches, self.reports)

    def compiled(self, wanted: Sequence[str]) -> Compiled:
        """Code that makes just these outputs and all changes of the state."""
        key = tuple(wanted)
        if key not in self._compiled:
            self._compiled[key] = _reduced(self.graph, [self._place(name) for name in wanted])
        return self._compiled[key]

    def _place(self, name: str) -> int:
        if name not in self.fetches:
            raise ConfigError(
                f"fetch {name!r} is not one of this program: {did_you_mean(name, self.fetches)}"
            )
        return self.fetches.index(name)


def _reduced(graph: fx.GraphModule, places: Sequence[int]) -> Compiled:
    """The graph with fewer outputs, without what only the others needed."""
    copy = fx.Graph()
    outputs = copy.graph_copy(graph.graph, {})
    assert isinstance(outputs, (list, tuple))
    copy.output([outputs[place] for place in places])
    drop_unused(copy)
    return fx.GraphModule(graph, copy)


def drop_unused(graph: fx.Graph) -> int:
    """Remove nodes that nothing needs and that change nothing; how many."""
    dropped = 0
    for node in reversed(graph.nodes):
        if not node.users and node.op not in ("placeholder", "output") and not has_effect(node):
            graph.erase_node(node)
            dropped += 1
    return dropped


def has_effect(node: fx.Node) -> bool:
    """Whether a node does something beside computing its value."""
    target: Any = node.target
    if node.op != "call_function" or not isinstance(target, torch._ops.OpOverload):
        return node.op != "get_attr" and node.op != "call_function"
    if target.namespace in ("_c10d_functional", "c10d"):
        return True
    # batch norm changes its statistics, though its schema does not say so
    return target._schema.is_mutable or target.overloadpacket is torch.ops.aten.native_batch_norm
