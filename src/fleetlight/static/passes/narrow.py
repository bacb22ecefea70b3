# SPDX-License-Identifier: Apache-2.0
"""Buckets travel in a narrower type: half the bytes, and fewer digits."""

from __future__ import annotations

import dataclasses

import torch

from fleetlight.collective.buckets import MIB
from fleetlight.static.graph.form import Form
from fleetlight.static.passes.all_reduces import AllReduce, all_reduces_of
from fleetlight.static.passes.operations import Pen
from fleetlight.torch_compat.operators import CAST


@dataclasses.dataclass(frozen=True)
class Narrow:
    """Floating-point buckets are cast before they are reduced, and back when they are means.

    For buckets of all workers at once; by levels, the reducer narrows what the leaders send. It
    divides by the number of workers before it sums, so sums fit into float16 where the gradients
    do.
    """

    dtype: torch.dtype = torch.float16
    name = "narrow"

    def __call__(self, form: Form) -> Form:
        """The form, whose wide buckets travel narrow; fused ones take fewer casts."""
        graph, _ = form.copied()
        wide = [reduction for reduction in all_reduces_of(graph) if _is_wide(reduction)]
        before = sum(reduction.bytes for reduction in wide)
        for reduction in wide:
            _narrow(reduction, self.dtype)
        after = sum(reduction.bytes for reduction in wide)
        kind = str(self.dtype).removeprefix("torch.")
        told = f"{len(wide)} buckets travel as {kind}: {before / MIB:.2f} -> {after / MIB:.2f} MiB"
        return form.rewritten(graph, told)


def _is_wide(reduction: AllReduce) -> bool:
    return reduction.value.is_floating_point() and reduction.value.element_size() > 2


def _narrow(reduction: AllReduce, dtype: torch.dtype) -> None:
    graph, pen, wide = reduction.begin.graph, Pen(reduction.begin), reduction.value.dtype
    with graph.inserting_before(reduction.begin):
        narrow = pen.write(CAST, reduction.bucket, dtype=dtype)
    with graph.inserting_after(reduction.end):
        means = pen.write(CAST, narrow, dtype=wide)
    reduction.give(means)
    for node in (reduction.begin, reduction.end):
        node.args = (narrow, *node.args[1:])
