# SPDX-License-Identifier: Apache-2.0
"""What is done with gradients in the end: blocks of the optimizer's step, and what is pushed."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from torch import fx

from fleetlight.static.drawing.levels import names_of_operations
from fleetlight.static.drawing.words import counted
from fleetlight.static.graph.form import Form
from fleetlight.static.graph.marks import GRADIENT
from fleetlight.static.graph.text import short_name

#: more kernels than these are one block
_MOST = 4


@dataclasses.dataclass(frozen=True)
class Step:
    """One block, the first to be done first."""

    title: str
    kind: str
    #: what it does
    operations: str
    changes: str
    full: str
    nodes: frozenset[fx.Node] = dataclasses.field(compare=False, repr=False)


def steps_of(form: Form, optimizer: str = "") -> tuple[Step, ...]:
    """Those of a program; where it has only gradients, who steps is somebody else."""
    title = f"step of {optimizer}" if optimizer else "optimizer's step"
    update = [
        node
        for node in form.graph.nodes
        if node.op == "call_function"
        and node.meta.get("part") == "update"
        and not short_name(node).startswith("fleetlight.reduce")
    ]
    if not update:
        return (_elsewhere(form),) if any(n.target is GRADIENT for n in form.graph.nodes) else ()
    inputs = [node for node in form.graph.nodes if node.op == "placeholder"]
    held = {node for node, s in zip(inputs, form.state, strict=False) if s.kind == "parameter"}
    return tuple(_step(title, nodes, held) for nodes in _parted(update))


def _parted(update: Sequence[fx.Node]) -> list[list[fx.Node]]:
    """Behind each fused kernel, of which there is one for a param group, a new block begins."""
    parts: list[list[fx.Node]] = [[]]
    for node in update:
        parts[-1].append(node)
        if "fused" in short_name(node):
            parts.append([])
    parts = [part for part in parts if part]
    if len(parts) > _MOST:
        return [list(update)]
    if len(parts) > 1 and not any("fused" in short_name(node) for node in parts[-1]):
        parts[-2:] = [[*parts[-2], *parts[-1]]]
    return parts


def _step(title: str, nodes: Sequence[fx.Node], held: set[fx.Node]) -> Step:
    counts = names_of_operations(nodes)
    often = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    fused = [name for name in counts if "fused" in name]
    changed = {source for node in nodes for source in node.all_input_nodes if source in held}
    told = ", ".join(fused or [name for name, _ in often[:4]])
    full = [f"{count} {name}" for name, count in often]
    return Step(
        title,
        told,
        counted(len(nodes), "op"),
        f"changes {counted(len(changed), 'parameter')}" if changed else "",
        "\n".join([title, told, *full]),
        frozenset(nodes),
    )


def _elsewhere(form: Form) -> Step:
    """By parameter servers, or by an optimizer that takes the gradients."""
    tables = [] if form.split is None else list(form.split.pushes)
    marks = sum(node.target is GRADIENT for node in form.graph.nodes)
    pushed = f"push {', '.join(tables)}" if tables else ""
    dense = counted(marks - len(tables), "dense gradient")
    full = "\n".join(["parameter servers or a live optimizer take the gradients", *tables])
    title = "step outside"
    return Step(title, pushed, counted(len(tables), "table"), dense, full, frozenset())
