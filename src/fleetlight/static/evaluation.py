# SPDX-License-Identifier: Apache-2.0
"""From training to evaluation: no dropout, norms by their running statistics, no backward."""

from __future__ import annotations

import dataclasses
import operator
from typing import Any

import torch
from torch import fx

from fleetlight.errors import PlanError
from fleetlight.static.form import Form
from fleetlight.static.marks import UNLESS_TESTING


def evaluation(form: Form) -> Form:
    """The forward as it is computed when nobody trains."""
    graph, _ = form.copied()
    for node in reversed(graph.nodes):
        if node.meta.get("part", "forward") != "forward":
            graph.erase_node(node)
    for node in reversed(graph.nodes):
        # what a norm keeps for its backward
        if node.target is operator.getitem and not node.users:
            graph.erase_node(node)
    _take_tested(graph)
    _drop_changes(graph)
    _refuse_chance(graph)
    names = {node.name for node in graph.nodes}
    kept = {name: node for name, node in form.fetches.items() if node in names}
    return dataclasses.replace(form, graph=graph, fetches=kept, reports=())


def _take_tested(graph: fx.Graph) -> None:
    """Of what is computed in two ways, take the other, and drop what only training computes."""
    dead: list[fx.Node] = []
    for node in list(graph.nodes):
        if node.target is UNLESS_TESTING:
            trained, tested = node.args
            node.replace_all_uses_with(tested)
            graph.erase_node(node)
            dead.append(trained)
    while dead:
        node = dead.pop()
        if not node.users and node.op == "call_function" and not node._erased:
            inputs = node.all_input_nodes
            graph.erase_node(node)
            dead += inputs


def _drop_changes(graph: fx.Graph) -> None:
    """An evaluation leaves the state as it is."""
    for node in reversed(graph.nodes):
        if not node.users and node.op == "call_function" and _changes_state(node):
            graph.erase_node(node)


def _changes_state(node: fx.Node) -> bool:
    target: Any = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return False
    if target.overloadpacket is torch.ops.aten.native_batch_norm:
        return True
    changed = [
        node.args[place]
        for place, argument in enumerate(target._schema.arguments)
        if argument.alias_info is not None
        and argument.alias_info.is_write
        and place < len(node.args)
    ]
    return any(isinstance(c, fx.Node) and _base(c).op == "placeholder" for c in changed)


def _base(node: fx.Node) -> fx.Node:
    """What a chain of views looks at."""
    while node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload):
        returns = node.target._schema.returns
        first = node.args[0] if node.args else None
        if not returns or returns[0].alias_info is None or not isinstance(first, fx.Node):
            break
        node = first
    return node


def _refuse_chance(graph: fx.Graph) -> None:
    for node in graph.nodes:
        tags = getattr(node.target, "tags", ())
        if torch.Tag.nondeterministic_seeded in tags and node.users:
            raise PlanError(
                f"clone(for_test=True): {node.name} draws random numbers, and nothing says what an "
                "evaluation computes in its place; use torch's own dropout functions, or capture "
                "model.eval() with optimizer=None"
            )
