# SPDX-License-Identifier: Apache-2.0
"""Lookups of layers on a device: their distinct rows are a tensor there, and torch does the rest.

Backward sums the gradients of each row on the device, in float32, and starts to copy the sums to
main memory. Torch's `use_deterministic_algorithms` fixes the order of these sums on a GPU.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import embedding_bag

from fleetlight.kernels.ids.bags import Mode
from fleetlight.ps.layers.grad_accumulation import accumulated
from fleetlight.ps.layers.handle import Counts, Visit
from fleetlight.ps.layers.staging import Arrival, staging_of
from fleetlight.ps.update import Floats, TableGradients
from fleetlight.torch_compat.tensors import without_functions

_NONE: Floats = np.empty((0, 0), np.float32)


class ArrivingGradients(TableGradients):
    """Gradients on their way to main memory: reading `gradients` waits for them."""

    def __init__(self, visit: Visit, counts: Counts, arrival: Arrival) -> None:
        self._arrival: Arrival | None = arrival
        self._gradients = _NONE
        self.ids, self.starts = visit.wanted.ids, visit.wanted.starts
        self.shows, self.clicks = counts or (None, None)

    @property
    def gradients(self) -> Floats:
        """The gradient of each distinct id."""
        if self._arrival is not None:
            self.gradients = self._arrival().numpy()
        return self._gradients

    @gradients.setter
    def gradients(self, gradients: Floats) -> None:
        self._gradients, self._arrival = gradients, None


@dataclasses.dataclass(frozen=True)
class TableRows:
    """The rows of one table in a forward; distinct ids outside `trained` receive no gradient."""

    visit: Visit
    counts: Counts
    trained: NDArray[np.bool_] | None = None

    def part(self, arrival: Arrival) -> TableGradients:
        """The gradient of the rows that learn."""
        part = ArrivingGradients(self.visit, self.counts, arrival)
        whole = self.trained is None or self.trained.all()
        return part if whole else part.only(self.trained)  # type: ignore[arg-type]


def rows_on_device(weights: Sequence[Tensor], tables: Sequence[TableRows]) -> Tensor:
    """The distinct rows of tables of one dim, in float32, one table after another."""
    with without_functions():
        out: Tensor = _Rows.apply(tables, *weights)  # type: ignore[no-untyped-call]
    return out


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tables: Sequence[TableRows], *weights: Tensor) -> Tensor:
        ctx.tables, ctx.weights = tables, weights
        device = weights[0].device
        found = [table.visit.found for table in tables]
        arrays = [rows for rows in found if isinstance(rows, np.ndarray)]
        if len(arrays) == len(found):
            return copied(arrays[0] if len(arrays) == 1 else np.concatenate(arrays), device)
        parts = [copied(rows, device) for rows in found]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        arrival = staging_of(gradient.device).to_host(gradient)
        ends = itertools.accumulate(len(table.visit.wanted.ids) for table in ctx.tables)
        found: list[Any] = []
        start = 0
        for n, (table, stop) in enumerate(zip(ctx.tables, ends, strict=True)):
            if ctx.needs_input_grad[1 + n]:
                part = table.part(_slice(arrival, start, stop))
                found.append(accumulated(ctx, ctx.weights[n], gradient, part, n))
            else:
                found.append(None)
            start = stop
        return None, *found


def copied(rows: Floats | Tensor, device: torch.device) -> Tensor:
    """Rows on a device; those of a cache are there."""
    return rows.to(device) if isinstance(rows, Tensor) else staging_of(device).to_device(rows)


def _slice(arrival: Arrival, start: int, stop: int) -> Arrival:
    return lambda: arrival()[start:stop]


def gathered(rows: Tensor, places: NDArray[np.int32]) -> Tensor:
    """The row of each place."""
    return rows.index_select(0, staging_of(rows.device).to_device(places))


def pooled(
    rows: Tensor,
    places: NDArray[np.int32],
    bounds: NDArray[np.int64],
    mode: Mode,
    weights: Tensor | None,
) -> Tensor:
    """One row for each bag; bag b has the places bounds[b] to bounds[b + 1]."""
    if not len(places):
        # zeros that belong to the graph
        zero = rows[:0].sum(0) if weights is None else rows[:0].sum(0) + weights.sum()
        return zero.expand(len(bounds) - 1, -1)
    staging = staging_of(rows.device)
    return embedding_bag(
        staging.to_device(places),
        rows,
        staging.to_device(bounds.astype(np.int32)),
        mode=mode,
        per_sample_weights=None if weights is None else weights.to(rows.device, rows.dtype),
        include_last_offset=True,
    )
