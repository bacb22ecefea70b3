# SPDX-License-Identifier: Apache-2.0
"""Lookups as autograd functions: rows in, gradients of distinct rows out."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.autograd.function import once_differentiable

from fleetlight.kernels import gather_bags, gather_visited, spread_bags, sum_visited, weight_grads
from fleetlight.kernels.ids.bags import Mode
from fleetlight.ps.layers.grad_accumulation import accumulated
from fleetlight.ps.layers.handle import Visit
from fleetlight.ps.update import Floats, TableGradients
from fleetlight.torch_compat.tensors import without_functions

Counts = tuple[Floats, Floats] | None


def embed(
    weight: Tensor, visit: Visit, counts: Counts, trained: NDArray[np.bool_] | None
) -> Tensor:
    """Return a row for each id; distinct ids outside `trained` receive no gradient."""
    with without_functions():
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
        if weight.device.type == "cpu":
            return torch.from_numpy(gather_visited(visit.rows, visit.inverse)).to(weight.dtype)
        rows = torch.from_numpy(visit.rows).to(weight.device, weight.dtype)
        return rows[torch.from_numpy(visit.inverse).to(weight.device, torch.int64)]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        visit: Visit = ctx.visit
        count = len(visit.wanted.ids)
        if gradient.device.type == "cpu":
            summed = sum_visited(as_floats(gradient), visit.inverse, count)
        else:
            inverse = torch.from_numpy(visit.inverse).to(gradient.device, torch.int64)
            sums = gradient.new_zeros(count, gradient.shape[1]).index_add_(0, inverse, gradient)
            summed = as_floats(sums)
        part = _part(visit, summed, ctx.counts)
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
        return torch.from_numpy(out).to(weight.device, weight.dtype)

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
        table = accumulated(ctx, ctx.weight, gradient, _part(visit, summed, ctx.counts))
        return table, of_weights, None, None, None, None


def _part(visit: Visit, summed: Floats, counts: Counts) -> TableGradients:
    shows, clicks = counts or (None, None)
    return TableGradients(visit.wanted.ids, visit.wanted.starts, summed, shows, clicks)


def as_floats(tensor: Tensor) -> Floats:
    """A tensor of any device as an array of float32."""
    array: Floats = tensor.detach().to("cpu", torch.float32).contiguous().numpy()
    return array
