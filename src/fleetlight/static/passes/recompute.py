# SPDX-License-Identifier: Apache-2.0
"""`strategy.recompute` in a program: modules that compute their activations again in backward.

A region is one call of a named module. The values of its forward that its backward needs are
computed a second time, from the module's inputs, just before their first use. The first values are
freed when the forward no longer needs them. These values are kept:

- values that the backward of another module needs, such as the output of the module,
- random numbers, since a second draw would be another dropout,
- results of operations that change the state, and values that are changed later. A batch
  norm is computed again without its statistics, so they count each batch once.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Sequence

from torch import fx

from fleetlight.errors import PlanError, did_you_mean
from fleetlight.static.graph.form import Form
from fleetlight.static.ops.marks import UNLESS_TESTING
from fleetlight.static.rewriting.regions import (
    Region,
    changers_of,
    is_training_norm,
    without_statistics,
)
from fleetlight.static.rewriting.registry import PassRecord, PassRequest
from fleetlight.static.writing.recorder import ModuleCall


@dataclasses.dataclass(frozen=True)
class Recompute:
    """`checkpoints` are paths of modules, as in `named_modules`."""

    checkpoints: Sequence[str]
    name = "recompute"

    def __call__(self, form: Form) -> Form:
        """The form, whose named modules store fewer activations."""
        _check_names(form.graph, self.checkpoints)
        graph, _ = form.copied()
        calls: dict[ModuleCall, list[fx.Node]] = defaultdict(list)
        for node in graph.nodes:
            call = _call_of(node, self.checkpoints)
            if call is not None:
                calls[call].append(node)
        changers, again, kept = changers_of(graph), 0, 0
        # later regions use the outputs of earlier ones
        for nodes in reversed(calls.values()):
            region = Region(nodes, changers)
            needed = region.needed()
            again, kept = again + len(needed), kept + len(region.kept(needed))
            _repeat(graph, region, needed)
        report = (
            f"{len(calls)} calls of modules compute {again} operations again in backward, and "
            f"keep {kept} values that must not be computed twice"
        )
        return form.rewritten(graph, report)


def _check_names(graph: fx.Graph, names: Iterable[str]) -> None:
    known: set[str] = {""}
    for node in graph.nodes:
        path = node.meta.get("module") or ""
        while path:
            known.add(path)
            path = path.rpartition(".")[0]
    for name in names:
        if name not in known:
            raise PlanError(
                f"recompute_configs.checkpoints: no module {name!r} computes a value in the "
                f"program; {did_you_mean(name, sorted(filter(None, known)))}"
            )


def _call_of(node: fx.Node, names: Iterable[str]) -> ModuleCall | None:
    """The outermost call of one of the modules that a node belongs to."""
    # a loaded program has module paths only
    calls = node.meta.get("calls") or (ModuleCall(node.meta.get("module") or "", 0),)
    for path, number in calls:
        for name in names:
            # "" is the whole model
            if path and (not name or path == name or path.startswith(f"{name}.")):
                return ModuleCall(name, number)
    return None


def _repeat(graph: fx.Graph, region: Region, needed: Sequence[fx.Node]) -> None:
    """Make the backward of a region use recomputed values."""
    users = [u for u in region.backward if not set(needed).isdisjoint(u.all_input_nodes)]
    if not users:
        return
    copies: dict[fx.Node, fx.Node] = {}
    with graph.inserting_before(min(users)):
        for node in needed:
            copies[node] = _copy(graph, node, copies)
    for user in users:
        for node in user.all_input_nodes:
            user.replace_input_with(node, copies.get(node, node))


def _copy(graph: fx.Graph, node: fx.Node, copies: dict[fx.Node, fx.Node]) -> fx.Node:
    if node.target is UNLESS_TESTING:
        trained = node.all_input_nodes[0]
        return copies.get(trained, trained)
    copy = graph.node_copy(node, lambda n: copies.get(n, n))
    copy.meta["part"] = "backward"
    if is_training_norm(copy):
        copy.args = without_statistics(copy.args)
    return copy


def _wanted(request: PassRequest) -> Recompute | None:
    names = request.strategy.recompute_configs.checkpoints
    return Recompute(tuple(names)) if request.strategy.recompute and names else None


PASS = PassRecord(Recompute.name, _wanted)
