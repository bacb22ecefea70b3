# SPDX-License-Identifier: Apache-2.0
"""`strategy.compression` in a program: marks the gradients that the reducer compresses.

The reducer keeps error feedback by parameter, so each of these gradients gets the memory layout of
its parameter.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from torch import Tensor, fx

from fleetlight.collective.buckets import MIB
from fleetlight.collective.reduction.coverage import coded_in
from fleetlight.errors import PlanError
from fleetlight.static.graph.aliases import is_view
from fleetlight.static.graph.form import Form
from fleetlight.static.rewriting.all_reduces import AllReduce, all_reduces_of, members_of
from fleetlight.static.rewriting.gradient_layout import GradientLayout
from fleetlight.static.rewriting.nodes import NodeWriter
from fleetlight.static.rewriting.registry import PassRecord, PassRequest


@dataclasses.dataclass(frozen=True)
class Compress:
    """Runs before `fuse_all_reduce`, so that no bucket mixes codecs."""

    #: the name of the codec
    codec: str
    #: whether a parameter's gradient is compressed
    covers: Callable[[Tensor], bool]
    #: the compressed size of a number of values
    message_bytes: Callable[[int], int]
    name = "compress"

    def __call__(self, form: Form) -> Form:
        """The form, whose large gradients name their codec."""
        graph, _ = form.copied()
        parameters = {slot.name: slot.tensor for slot in form.state if slot.kind == "parameter"}
        members, singles = members_of(graph), all_reduces_of(graph)
        coded = []
        for single in singles:
            mark = self._mark_of(members[single.index])
            parameter = parameters.get(str(mark.args[1]))
            if parameter is not None and self.covers(parameter):
                coded.append(single)
                single.mark(codec=self.codec)
                _lay_out(single, mark, GradientLayout.of(parameter))
        return form.rewritten(graph, self._report(singles, coded))

    def _report(self, singles: list[AllReduce], coded: list[AllReduce]) -> str:
        before = sum(single.bytes for single in singles)
        saved = sum(one.bytes - self.message_bytes(one.value.numel()) for one in coded)
        return (
            f"{len(coded)} of {len(singles)} gradients travel as {self.codec}: "
            f"{before / MIB:.2f} -> {(before - saved) / MIB:.2f} MiB"
        )

    def _mark_of(self, marks: tuple[fx.Node, ...]) -> fx.Node:
        if len(marks) > 1:
            raise PlanError(
                f"{self.name} must run before the pass that fuses gradients into buckets, but ran "
                "after it"
            )
        return marks[0]


def _lay_out(single: AllReduce, mark: fx.Node, wanted: GradientLayout) -> None:
    """Reduce a copy in the wanted layout if the gradient has another one."""
    (old,) = mark.all_input_nodes
    found = GradientLayout.of(old.meta["val"])
    if found.order == wanted.order:
        return
    graph, pen = single.begin.graph, NodeWriter(single.begin)
    with graph.inserting_before(single.begin):
        row = wanted.flat(pen, found.shaped(pen, single.bucket))
    with graph.inserting_before(single.end.next):
        means = wanted.shaped(pen, row)
    mark.replace_input_with(old, means)
    for node in (single.begin, single.end):
        node.args = (row, *node.args[1:])
    while not old.users and is_view(old) and single.end < old:
        unused, old = old, old.all_input_nodes[0]
        graph.erase_node(unused)


def _wanted(request: PassRequest) -> Compress | None:
    compression = None if request.reduction is None else request.reduction.compression
    if compression is None:
        return None
    compression.check(name for name, _ in request.model.named_parameters())
    coded: set[Tensor] = set(coded_in(request.model, compression).values())
    return Compress(compression.codec.name, coded.__contains__, compression.message_bytes)


PASS = PassRecord(Compress.name, _wanted, after=("insert_all_reduce",))
