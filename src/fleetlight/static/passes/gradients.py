# SPDX-License-Identifier: Apache-2.0
"""Where the gradients of a program are: the marks that its writer has left for passes."""

from __future__ import annotations

from torch import fx

from fleetlight.static.graph.aliases import base_of
from fleetlight.static.graph.marks import GRADIENT


def gradients_of(graph: fx.Graph) -> list[fx.Node]:
    """The marks, in the order in which backward makes the gradients."""
    order = {node: place for place, node in enumerate(graph.nodes)}
    marks = [node for node in graph.nodes if node.target is GRADIENT]
    return sorted(marks, key=lambda mark: order[base_of(made_by(mark))])


def made_by(mark: fx.Node) -> fx.Node:
    """The node whose value is marked."""
    made = mark.args[0]
    assert isinstance(made, fx.Node)
    return made
