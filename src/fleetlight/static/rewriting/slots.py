# SPDX-License-Identifier: Apache-2.0
"""Additional state of a program, which a pass keeps between runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, fx

from fleetlight.errors import PlanError
from fleetlight.static.graph.form import Form
from fleetlight.static.graph.state import Kind, Slot
from fleetlight.static.ops.reductions import REDUCE
from fleetlight.static.rewriting.nodes import gradients_of
from fleetlight.torch_compat.fakes import FakeTensor
from fleetlight.torch_compat.tracing import rename, root


class Inputs:
    """The inputs of a graph in rewriting, and their state."""

    def __init__(self, graph: fx.Graph, form: Form) -> None:
        self._graph = graph
        self._nodes = [node for node in graph.nodes if node.op == "placeholder"]
        self.state = list(form.state)

    def of(self, kind: Kind) -> dict[str, fx.Node]:
        """The inputs of one kind of state, by name."""
        pairs = zip(self.state, self._nodes, strict=False)
        return {slot.name: node for slot, node in pairs if slot.kind == kind}

    def slot(self, kind: Kind, name: str) -> Slot | None:
        """The slot with this name, or None."""
        return next((s for s in self.state if (s.kind, s.name) == (kind, name)), None)

    def add(self, slot: Slot) -> fx.Node:
        """Add an input after the state."""
        place = len(self.state)
        before = self._nodes[place - 1] if place else root(self._graph)
        with self._graph.inserting_after(before):
            node = self._graph.placeholder(f"{slot.kind}_{place}")
        rename(node, "".join(c if c.isalnum() else "_" for c in f"p_{slot.name}_{slot.kind}"))
        node.meta["val"] = self._without_values(slot.tensor)
        self._nodes.insert(place, node)
        self.state.append(slot)
        return node

    def _without_values(self, tensor: Tensor) -> Tensor:
        values = (node.meta.get("val") for node in self._graph.nodes)
        fakes = next((v.fake_mode for v in values if isinstance(v, FakeTensor)), None)
        return tensor if fakes is None else fakes.from_tensor(tensor, static_shapes=True)


def marks_to_keep(graph: fx.Graph, who: str) -> list[fx.Node]:
    """The marks of gradients; an error if there are none or they are reduced already."""
    marks = gradients_of(graph)
    if not marks:
        raise PlanError(
            f"{who}: the program has no gradients that enter an optimizer; apply it "
            "after optimizer.minimize(loss)"
        )
    if any(node.target is REDUCE for node in graph.nodes):
        raise PlanError(
            f"{who} must run before the passes that reduce gradients, but ran after one"
        )
    return marks


def gradient_slots(marks: Sequence[fx.Node], inputs: Inputs) -> Mapping[str, fx.Node]:
    """A slot for each marked gradient, with its parameter's layout, by the parameter's name."""
    known = inputs.of("gradient")
    for mark in marks:
        name, value = str(mark.args[1]), mark.meta["val"]
        if name not in known:
            parameter = inputs.slot("parameter", name)
            like = torch.empty(value.shape) if parameter is None else parameter.tensor
            slot = Slot("gradient", name, torch.zeros_like(like, dtype=value.dtype).detach())
            known[name] = inputs.add(slot)
    return known


def weigh(graph: fx.Graph, inputs: Inputs, factor: float | fx.Node) -> None:
    """Multiply the gradients of a batch by a factor, where backward begins."""
    for node in inputs.of("weight").values():
        users = list(node.users)
        if users:
            _multiply(graph, node, min(users), factor)


def _multiply(graph: fx.Graph, node: fx.Node, first: fx.Node, factor: float | fx.Node) -> None:
    with graph.inserting_before(first):
        weighted = graph.call_function(torch.ops.aten.mul.Tensor, (node, factor))
    weighted.meta.update(part="backward", module="", val=node.meta["val"])
    node.replace_all_uses_with(weighted, lambda user: user is not weighted)
