# SPDX-License-Identifier: Apache-2.0
"""`strategy.use_hierarchical_allreduce` in a program: buckets are summed level by level."""

from __future__ import annotations

import dataclasses

import torch

from fleetlight.collective.routes.levels import Groups, described
from fleetlight.static.graph.form import Form
from fleetlight.static.passes.all_reduces import all_reduces_of


@dataclasses.dataclass(frozen=True)
class Hierarchical:
    """`inner` workers sum first among themselves, 0: those of a host; `levels` are told.

    The leaders' sums may be `narrow`, those inside a host are as wide as the gradients.
    """

    inner: int
    levels: tuple[Groups, ...]
    narrow: torch.dtype | None = None
    name = "hierarchical"

    def __call__(self, form: Form) -> Form:
        """The form, whose buckets say that they go by levels."""
        graph, _ = form.copied()
        reductions = all_reduces_of(graph)
        for reduction in reductions:
            reduction.mark(inner=self.inner)
        told = f"{len(reductions)} all-reduces go by levels: {described(self.levels)}"
        if self.narrow is not None:
            told += f" in {str(self.narrow).removeprefix('torch.')}"
        return form.rewritten(graph, told)
