# SPDX-License-Identifier: Apache-2.0
"""`strategy.amp` in a program: products compute in a narrow type, everything else in float32.

Autocast leaves the results of products narrow until an operation needs them wide. Here they are
widened at once, and narrowed again only for the next product. So parameters, optimizer,
norms, losses and sums are float32. Between products the results have more digits than autocast's.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import fx

from fleetlight.errors import PlanError, StrategyError, did_you_mean
from fleetlight.static.graph.form import Form
from fleetlight.static.graph.schedule import SCALE, scaling_slots
from fleetlight.static.rewriting.narrowing import Narrowing
from fleetlight.static.rewriting.nodes import NodeWriter, gradients_of
from fleetlight.static.rewriting.registry import PassRecord, PassRequest
from fleetlight.static.rewriting.slots import Inputs, gradient_slots, marks_to_keep, weigh

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
#: steps without overflow before the loss scale grows, as in torch.amp.GradScaler; and never
_INTERVAL, _NEVER = 2000, 1 << 30


@dataclasses.dataclass(frozen=True)
class Amp:
    """Also scales the loss for float16, in which small gradients would become zero."""

    dtype: str = "bfloat16"
    init_loss_scaling: float = 65536.0
    use_dynamic_loss_scaling: bool = True
    name = "amp"

    def __call__(self, form: Form) -> Form:
        """The form with narrow products, even of an evaluation."""
        if self.dtype not in _DTYPES:
            raise PlanError(f"amp: got dtype={self.dtype!r}; {did_you_mean(self.dtype, _DTYPES)}")
        graph, _ = form.copied()
        narrowing = Narrowing(graph, _DTYPES[self.dtype])
        narrowing.rewrite()
        report = (
            f"{narrowing.done} operations compute in {self.dtype}, {narrowing.casts} tensors are "
            "cast for them"
        )
        if self.dtype == "float16" and gradients_of(graph):
            return self._scaled(form, graph, report)
        return form.rewritten(graph, report)

    def _scaled(self, form: Form, graph: fx.Graph, report: str) -> Form:
        """The form with a loss scale, and gradients in slots for the overflow check."""
        if form.schedule.scales:
            raise PlanError("amp: the program scales its loss already; apply amp once")
        marks = marks_to_keep(graph, self.name)
        inputs = Inputs(graph, form)
        slots = gradient_slots(marks, inputs)
        for mark in marks:
            _hold(mark, slots[str(mark.args[1])])
        device = next(slot.tensor.device for slot in inputs.state if slot.kind == "weight")
        for slot in scaling_slots(self.init_loss_scaling, device):
            node = inputs.add(slot)
            if slot.name == SCALE:
                weigh(graph, inputs, node)
        interval = _INTERVAL if self.use_dynamic_loss_scaling else _NEVER
        schedule = dataclasses.replace(form.schedule, growth_interval=interval)
        report += f", the loss is scaled by {self.init_loss_scaling:g} at first"
        return form.rewritten(graph, report, schedule=schedule, state=tuple(inputs.state))


def _hold(mark: fx.Node, slot: fx.Node) -> None:
    """Put the gradient into a slot; the step uses it if there was no overflow."""
    if mark.meta["part"] == "update":
        # merged backwards: it is in the slot already and only needs the reduction
        mark.meta["part"] = "reduction"
    mark.replace_all_uses_with(slot)
    with mark.graph.inserting_after(mark):
        NodeWriter(mark).write(torch.ops.aten.copy_.default, slot, mark)


def _wanted(request: PassRequest) -> Amp | None:
    if not request.strategy.amp:
        return None
    configs = request.strategy.amp_configs
    if request.with_servers and configs.dtype == "float16":
        raise StrategyError(
            "strategy.amp_configs.dtype: got 'float16', which needs a loss scale, and a "
            "program that trains with parameter servers has none; use 'bfloat16'"
        )
    return Amp(configs.dtype, configs.init_loss_scaling, configs.use_dynamic_loss_scaling)


PASS = PassRecord(Amp.name, _wanted, after=("recompute",))
