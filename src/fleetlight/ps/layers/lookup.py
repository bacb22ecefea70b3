# SPDX-License-Identifier: Apache-2.0
"""Lookups as autograd functions: rows in, gradients of distinct rows out.

Those of layers in main memory call kernels; `device_rows.py` has those of other devices.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.autograd.function import once_differentiable

from fleetlight.kernels import gather_bags, gather_visited, spread_bags, sum_visited, weight_grads
from fleetlight.kernels.ids.bags import Mode
from fleetlight.ps.layers.device_rows import (
    TableRows,
    gathered,
    pooled,
    rows_on_device,
)
from fleetlight.ps.layers.grad_accumulation import accumulated
from fleetlight.ps.layers.handle import Counts, Visit
from fleetlight.ps.layers.staging import is_on_device
from fleetlight.ps.update import Floats
from fleetlight.torch_compat.tensors import without_functions


def embed(
    weight: Tensor, visit: Visit, counts: Counts, trained: NDArray[np.bool_] | None
) -> Tensor:
    """Return a row for each id; distinct ids outside `trained` receive no gradient."""
    with without_functions():
        if is_on_device(weight):
            rows = rows_on_device([weight], [TableRows(visit, counts, trained)])
            return gathered(rows, visit.inverse).to(weight.dtype)
        out: Tensor = _Embed.apply(weight, visit, counts, trained)  # type: ignore[no-untyped-call]
    return out


def embed_bags(
    weight: Tensor,
    weights: Tensor | None,
    visit: Visit,
    offsets: NDArray[np.int64],
    mode: Mode,
    counts: Counts,
) -> Tensor:
    """Reduce the rows of each bag of ids to one row."""
    with without_functions():
        if is_on_device(weight):
            rows = rows_on_device([weight], [TableRows(visit, counts)])
            return pooled(rows, visit.inverse, offsets, mode, weights).to(weight.dtype)
        out: Tensor = _EmbedBags.apply(  # type: ignore[no-untyped-call]
            weight, weights, visit, offsets, mode, counts
        )
    return out


class _Embed(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, weight: Tensor, visit: Visit, counts: Counts, trained: NDArray[np.bool_] | None
    ) -> Tensor:
        ctx.weight, ctx.visit, ctx.counts, ctx.trained = weight, visit, counts, trained
        return torch.from_numpy(gather_visited(visit.rows, visit.inverse)).to(weight.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        visit: Visit = ctx.visit
        summed = sum_visited(as_floats(gradient), visit.inverse, len(visit.wanted.ids))
        part = visit.part(summed, ctx.counts)
        if ctx.trained is not None and not ctx.trained.all():
            part = part.only(ctx.trained)
        return accumulated(ctx, ctx.weight, gradient, part), None, None, None


class _EmbedBags(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        weight: Tensor,
        weights: Tensor | None,
        visit: Visit,
        offsets: NDArray[np.int64],
        mode: Mode,
        counts: Counts,
    ) -> Tensor:
        ctx.weight, ctx.weights, ctx.visit, ctx.counts = weight, weights, visit, counts
        ctx.offsets, ctx.mode = offsets, mode
        each = None if weights is None else as_floats(weights)
        out, ctx.argmax = gather_bags(visit.rows, visit.inverse, offsets, each, mode)
        return torch.from_numpy(out).to(weight.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        visit: Visit = ctx.visit
        grads = as_floats(gradient)
        each = None if ctx.weights is None else as_floats(ctx.weights)
        summed = spread_bags(
            grads, visit.inverse, ctx.offsets, each, ctx.mode, len(visit.wanted.ids), ctx.argmax
        )
        of_weights = None
        if ctx.weights is not None and ctx.needs_input_grad[1]:
            dots = weight_grads(grads, visit.rows, visit.inverse, ctx.offsets)
            of_weights = torch.from_numpy(dots).to(ctx.weights.device, ctx.weights.dtype)
        table = accumulated(ctx, ctx.weight, gradient, visit.part(summed, ctx.counts))
        return table, of_weights, None, None, None, None


def as_floats(tensor: Tensor) -> Floats:
    """A tensor of any device as an array of float32."""
    array: Floats = tensor.detach().to("cpu", torch.float32).contiguous().numpy()
    return array
