# SPDX-License-Identifier: Apache-2.0
"""Synchronised batch norm: training uses statistics of the batches of all workers."""

from __future__ import annotations

import dataclasses
import operator
from typing import Any

import torch
from torch import Tensor, fx

from fleetlight.errors import PlanError
from fleetlight.static.graph.form import Form
from fleetlight.static.ops.norms import SYNCED_NORM, SYNCED_NORM_BACKWARD
from fleetlight.static.rewriting.nodes import NodeWriter
from fleetlight.static.rewriting.regions import is_training_norm
from fleetlight.static.rewriting.registry import PassRecord, PassRequest

_aten = torch.ops.aten
#: arguments of torch's backward: the gradient, the input, the weight and the saved mean
_BACKWARDS: dict[Any, tuple[int, int, int, int]] = {
    _aten.native_batch_norm_backward.default: (0, 1, 2, 5),
    _aten.cudnn_batch_norm_backward.default: (1, 0, 2, 5),
}
#: the result of the synchronised norm with the number of values
_COUNT = 3


@dataclasses.dataclass(frozen=True)
class SyncBatchNorm:
    """Replaces torch's batch norms in training, forward and backward; evaluations do not change."""

    name = "sync_batch_norm"

    def __call__(self, form: Form) -> Form:
        """The form, whose norms exchange statistics between workers."""
        graph, _ = form.copied()
        norms = [node for node in graph.nodes if is_training_norm(node)]
        counts = {norm: _synchronise(norm) for norm in norms}
        for node in list(graph.nodes):
            if node.target in _BACKWARDS:
                _synchronise_backward(node, counts)
        return form.rewritten(graph, f"{len(norms)} batch norms use the batches of all workers")


def _synchronise(norm: fx.Node) -> fx.Node:
    """Replace a norm; return the node with the number of values."""
    x, weight, bias, mean, var, _, momentum, eps = norm.args[:8]
    _become(norm, SYNCED_NORM, x, weight, bias, mean, var, momentum, eps)
    with norm.graph.inserting_after(norm):
        return NodeWriter(norm).write(operator.getitem, norm, _COUNT)


def _synchronise_backward(node: fx.Node, counts: dict[fx.Node, fx.Node]) -> None:
    gradient, x, weight, kept = (node.args[place] for place in _BACKWARDS[node.target])
    norm = kept.args[0] if isinstance(kept, fx.Node) and kept.target is operator.getitem else None
    if not isinstance(norm, fx.Node) or norm not in counts:
        raise PlanError(
            f"strategy.sync_batch_norm: {node.name} belongs to no batch norm of the program that "
            "trains; train eagerly, or without sync_batch_norm"
        )
    results = {int(str(user.args[1])): user for user in norm.users}
    with node.graph.inserting_before(node):
        inverse = results.get(2) or NodeWriter(norm).write(operator.getitem, norm, 2)
    _become(node, SYNCED_NORM_BACKWARD, gradient, x, weight, kept, inverse, counts[norm])


def _become(node: fx.Node, target: Any, *args: Any) -> None:
    """Change the operation of a node; its results keep their indices."""
    node.target, node.args, node.kwargs = target, args, {}
    given = fx.map_arg(args, lambda source: source.meta["val"])
    with torch.no_grad():
        made = node.meta["val"] = target(*given)
    for user in node.users:
        if user.target is operator.getitem and isinstance(user.meta.get("val"), Tensor):
            place = int(str(user.args[1]))
            if place < len(made):
                user.meta["val"] = made[place]


def _wanted(request: PassRequest) -> SyncBatchNorm | None:
    has_others = request.reduction is not None
    return SyncBatchNorm() if has_others and request.strategy.sync_batch_norm else None


PASS = PassRecord(SyncBatchNorm.name, _wanted, after=("gradient_merge",))
