# SPDX-License-Identifier: Apache-2.0
"""`strategy.gradient_merge` in a program: k backwards make one step.

Each backward adds its gradients to slots of the state. The nodes after the marks of the
gradients, such as all-reduces, run once after k backwards.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import torch
from torch import fx

from fleetlight.errors import PlanError
from fleetlight.static.graph.aliases import base_of
from fleetlight.static.graph.form import Form
from fleetlight.static.rewriting.nodes import NodeWriter, made_by
from fleetlight.static.rewriting.regions import changers_of
from fleetlight.static.rewriting.registry import PassRecord, PassRequest
from fleetlight.static.rewriting.slots import Inputs, gradient_slots, marks_to_keep, weigh
from fleetlight.static.writing.recorder import Part


@dataclasses.dataclass(frozen=True)
class GradientMerge:
    """`avg`: the step uses the mean of the k gradients instead of their sum."""

    k_steps: int
    avg: bool = True
    name = "gradient_merge"

    def __call__(self, form: Form) -> Form:
        """The form with a schedule of k backwards for each step."""
        self._check(form)
        if self.k_steps == 1:
            return form.rewritten(form.graph, "every backward makes a step")
        graph, _ = form.copied()
        marks = marks_to_keep(graph, self.name)
        inputs = Inputs(graph, form)
        slots = gradient_slots(marks, inputs)
        changers = changers_of(graph)
        for mark in marks:
            made = made_by(mark)
            last = max(made, *changers.get(base_of(made), ()), made)
            _accumulate(mark, slots[str(mark.args[1])], last)
        _postpone(marks, "reduction" if form.schedule.scales else "update")
        if self.avg:
            # weigh each backward, which saves a division of the sums
            weigh(graph, inputs, 1.0 / self.k_steps)
        return self._scheduled(form, graph, inputs)

    def _check(self, form: Form) -> None:
        if not isinstance(self.k_steps, int) or self.k_steps < 1:
            raise PlanError(f"gradient_merge: got k_steps={self.k_steps!r}, expected 1 or more")
        if form.schedule.merges > 1:
            raise PlanError("gradient_merge: the program merges backwards already; merge once")

    def _scheduled(self, form: Form, graph: fx.Graph, inputs: Inputs) -> Form:
        schedule = dataclasses.replace(form.schedule, merges=self.k_steps)
        for slot in schedule.slots():
            inputs.add(slot)
        kept = [slot.tensor for slot in inputs.state if slot.kind == "gradient"]
        size = sum(t.numel() * t.element_size() for t in kept) / 2**20
        how = "averaged" if self.avg else "summed"
        report = f"{self.k_steps} backwards make one step, {len(kept)} gradients are {how}"
        return form.rewritten(
            graph, f"{report} ({size:.2f} MiB)", schedule=schedule, state=tuple(inputs.state)
        )


def _accumulate(mark: fx.Node, slot: fx.Node, last: fx.Node) -> None:
    """Add the gradient to the slot once it is complete, and mark the slot instead."""
    pen, made = NodeWriter(mark), made_by(mark)
    with mark.graph.inserting_before(mark if last.op == "placeholder" else last.next):
        pen.write(torch.ops.aten.add_.Tensor, slot, made)
    mark.args = (slot, *mark.args[1:])
    mark.meta["val"] = slot.meta["val"]


def _postpone(marks: Iterable[fx.Node], part: Part) -> None:
    """Move the nodes that depend on the marks to a later part."""
    pending = list(marks)
    while pending:
        node = pending.pop()
        if node.meta["part"] == "backward":
            node.meta["part"] = part
            pending += node.users


def _wanted(request: PassRequest) -> GradientMerge | None:
    configs = request.strategy.gradient_merge_configs
    merges = request.strategy.gradient_merge and configs.k_steps > 1
    # with servers the live optimizer makes the steps, and merges
    return (
        GradientMerge(configs.k_steps, configs.avg) if merges and not request.with_servers else None
    )


PASS = PassRecord(GradientMerge.name, _wanted, after=("amp",))
