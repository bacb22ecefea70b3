# SPDX-License-Identifier: Apache-2.0
"""How buckets are reduced: in a narrower type, or by hierarchical all-reduce."""

from __future__ import annotations

import dataclasses

import torch

from fleetlight.collective.buckets import MIB
from fleetlight.collective.routes.levels import Groups, described
from fleetlight.static.graph.form import Form
from fleetlight.static.rewriting.all_reduces import AllReduce, all_reduces_of
from fleetlight.static.rewriting.nodes import NodeWriter
from fleetlight.static.rewriting.registry import PassRecord, PassRequest
from fleetlight.torch_compat.operators import CAST


@dataclasses.dataclass(frozen=True)
class Narrow:
    """Casts floating-point buckets before the all-reduce, and the means back.

    For flat all-reduces; in hierarchical ones the reducer narrows messages between leaders. The
    reducer divides by the number of workers before it sums, so sums fit into float16 if
    gradients do.
    """

    dtype: torch.dtype = torch.float16
    name = "narrow"

    def __call__(self, form: Form) -> Form:
        """The form with narrow buckets; fused ones need fewer casts."""
        graph, _ = form.copied()
        wide = [reduction for reduction in all_reduces_of(graph) if _is_wide(reduction)]
        before = sum(reduction.bytes for reduction in wide)
        for reduction in wide:
            _narrow(reduction, self.dtype)
        after = sum(reduction.bytes for reduction in wide)
        kind = str(self.dtype).removeprefix("torch.")
        report = (
            f"{len(wide)} buckets travel as {kind}: {before / MIB:.2f} -> {after / MIB:.2f} MiB"
        )
        return form.rewritten(graph, report)


def _is_wide(reduction: AllReduce) -> bool:
    return reduction.value.is_floating_point() and reduction.value.element_size() > 2


def _narrow(reduction: AllReduce, dtype: torch.dtype) -> None:
    graph, pen, wide = reduction.begin.graph, NodeWriter(reduction.begin), reduction.value.dtype
    with graph.inserting_before(reduction.begin):
        narrow = pen.write(CAST, reduction.bucket, dtype=dtype)
    with graph.inserting_after(reduction.end):
        means = pen.write(CAST, narrow, dtype=wide)
    reduction.give(means)
    for node in (reduction.begin, reduction.end):
        node.args = (narrow, *node.args[1:])


@dataclasses.dataclass(frozen=True)
class Hierarchical:
    """`strategy.use_hierarchical_allreduce` in a program.

    `inner`: size of an inner group, 0: the workers of a host; `levels` is for the report.
    Messages between leaders may be `narrow`; sums inside a host are as wide as the gradients.
    """

    inner: int
    levels: tuple[Groups, ...]
    narrow: torch.dtype | None = None
    name = "hierarchical"

    def __call__(self, form: Form) -> Form:
        """The form with hierarchical all-reduces."""
        graph, _ = form.copied()
        reductions = all_reduces_of(graph)
        for reduction in reductions:
            reduction.mark(inner=self.inner)
        report = f"{len(reductions)} all-reduces are hierarchical: {described(self.levels)}"
        if self.narrow is not None:
            report += f" in {str(self.narrow).removeprefix('torch.')}"
        return form.rewritten(graph, report)


def _wanted_narrow(request: PassRequest) -> Narrow | None:
    narrow = None if request.reduction is None else request.reduction.narrow
    # the pass would also round the gradients of workers that train alone
    if narrow is None or request.goes_by_levels or request.trains_alone:
        return None
    return Narrow(narrow)


def _wanted_levels(request: PassRequest) -> Hierarchical | None:
    reduction = request.reduction
    if reduction is None or reduction.inner is None or not request.goes_by_levels:
        return None
    return Hierarchical(reduction.inner, request.levels, reduction.narrow)


NARROW = PassRecord(Narrow.name, _wanted_narrow, after=("fuse_all_reduce",))
HIERARCHICAL = PassRecord(Hierarchical.name, _wanted_levels, after=("fuse_all_reduce",))
