# SPDX-License-Identifier: Apache-2.0
"""From training to evaluation: no dropout, norms with running statistics, no backward."""

from __future__ import annotations

import dataclasses
import operator

import torch
from torch import fx

from fleetlight.errors import PlanError
from fleetlight.static.graph.aliases import base_of, changed_by
from fleetlight.static.graph.form import Form, has_effect, in_forward
from fleetlight.static.graph.rng import node_draws
from fleetlight.static.graph.schedule import Schedule
from fleetlight.static.ops.marks import LOOKS_AT_TRAINING, UNLESS_TESTING
from fleetlight.torch_compat.tracing import was_erased


def evaluation(form: Form) -> Form:
    """The forward as an evaluation computes it."""
    graph, _ = form.copied()
    for node in reversed(graph.nodes):
        if not in_forward(node) and node.op != "placeholder":
            graph.erase_node(node)
    fetched = set(form.fetches.values())
    for node in reversed(graph.nodes):
        if node.target is operator.getitem and not node.users and has_effect(node.args[0]):
            # values that a norm saves for its backward
            graph.erase_node(node)
    _refuse_training_flag(graph)
    _take_tested(graph)
    _drop_changes(graph, form)
    missing = _drop_random(graph, fetched)
    names = {node.name for node in graph.nodes}
    kept = {name: node for name, node in form.fetches.items() if node in names}
    return dataclasses.replace(
        form,
        graph=graph,
        fetches=kept,
        reports=(),
        schedule=Schedule(),
        missing={**form.missing, **missing},
    )


def _take_tested(graph: fx.Graph) -> None:
    """Replace each training branch by its evaluation twin, and drop the training branch."""
    dead: list[fx.Node] = []
    for node in graph.nodes:
        if node.target is UNLESS_TESTING:
            trained, tested = node.args
            # it keeps its name, since fetches use it
            node.target, node.args = torch.ops.aten.alias.default, (tested,)
            dead.append(trained)
    while dead:
        node = dead.pop()
        if not node.users and node.op == "call_function" and not was_erased(node):
            inputs = node.all_input_nodes
            graph.erase_node(node)
            dead += inputs


def _drop_changes(graph: fx.Graph, form: Form) -> None:
    """Drop changes of the state."""
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    state = dict(zip(inputs, form.state, strict=False))
    for node in reversed(graph.nodes):
        changed = [state[c] for c in map(base_of, changed_by(node)) if c in state]
        if not changed or not has_effect(node):
            continue
        if node.users:
            raise PlanError(
                f"clone(for_test=True): {node.name} changes {changed[0]} and uses the changed "
                "value, but an evaluation changes nothing; change a clone of it"
            )
        graph.erase_node(node)


def _drop_random(graph: fx.Graph, fetched: set[str]) -> dict[str, str]:
    """Drop remaining random operations, unless a fetched value depends on them.

    Returns the names of dropped values, with the reason.
    """
    random: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        inputs = {*node.all_input_nodes, *map(base_of, node.all_input_nodes)}
        before = (random[i] for i in inputs if i in random)
        first = node if node_draws(node) else next(before, None)
        if first is not None:
            for touched in {node, *map(base_of, changed_by(node))}:
                random[touched] = first
    missing = {
        node.name: (
            f"clone(for_test=True): {first.name} draws random numbers, and nothing says what "
            f"an evaluation computes instead for {node.name}; use torch's own dropout "
            "functions, or capture model.eval() with optimizer=None"
        )
        for node, first in random.items()
        if node.op == "call_function"
    }
    for node in random:
        if node.name in fetched and node.name in missing:
            raise PlanError(missing[node.name])
    for node in reversed(graph.nodes):
        if node in random and node.op == "call_function" and not node.users:
            graph.erase_node(node)
    return missing


def _refuse_training_flag(graph: fx.Graph) -> None:
    for node in graph.nodes:
        if node.target is LOOKS_AT_TRAINING:
            raise PlanError(
                f"clone(for_test=True): {node.args[0]} reads self.training itself, and "
                "nothing says what it does in an evaluation; pass self.training to torch's "
                "dropout or norm functions only, or capture model.eval() with optimizer=None"
            )
