# SPDX-License-Identifier: Apache-2.0
"""Batch norm over the batches of all workers, on any device.

torch's own SyncBatchNorm has no CPU kernels. Each worker contributes count, mean and sum of squared
deviations, which combine exactly (no difference of large squares); backward sums the two reductions
in the formula of batch norm. Statistics and sums are at least float32: a float16 counts to 2048 and
overflows at 65504.
"""

from __future__ import annotations

import functools
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fleetlight.collective.group import Group
from fleetlight.collective.reduction.reducer import Reducer
from fleetlight.torch_compat.modules import BatchNorm, check_batch_norm_input


def synchronise_batch_norm(module: nn.Module, group: Group, reducer: Reducer) -> int:
    """Make each batch norm of a module use all workers' batches; returns their number."""
    found = 0
    for child in module.modules():
        if isinstance(child, BatchNorm) and not isinstance(child, nn.SyncBatchNorm):
            # a new replica replaces the forward of the former one
            child.__dict__.pop("forward", None)
            child.forward = functools.partial(  # type: ignore[method-assign]
                _forward, child, child.forward, group, reducer
            )
            found += 1
    return found


def normalise_alone(module: nn.Module) -> None:
    """Undo `synchronise_batch_norm`."""
    for child in module.modules():
        put = child.__dict__.get("forward")
        if isinstance(put, functools.partial) and put.func is _forward:
            del child.__dict__["forward"]


def _forward(norm: BatchNorm, local: Any, group: Group, reducer: Reducer, x: Tensor) -> Tensor:
    uses_batch = norm.training or norm.running_mean is None
    if not uses_batch or group.alone:
        result: Tensor = local(x)
        return result
    check_batch_norm_input(norm, x)
    y, mean, var, count = _SyncedNorm.apply(  # type: ignore[no-untyped-call]
        x, norm.weight, norm.bias, norm.eps, group, reducer
    )
    if norm.training and norm.running_mean is not None:
        _update_running(norm, mean, var, count)
    return cast(Tensor, y)


def _update_running(norm: BatchNorm, mean: Tensor, var: Tensor, count: Tensor) -> None:
    assert norm.running_mean is not None
    assert norm.running_var is not None
    factor = norm.momentum
    if norm.num_batches_tracked is not None:
        norm.num_batches_tracked.add_(1)
        if factor is None:
            factor = 1.0 / float(norm.num_batches_tracked)
    move_running(norm.running_mean, norm.running_var, (mean, var, count), factor or 0.0)


Statistics = tuple[Tensor, Tensor, Tensor]


@torch.no_grad()
def move_running(
    running_mean: Tensor, running_var: Tensor, found: Statistics, factor: float
) -> None:
    """Update running statistics by mean, biased variance and count of all workers' batches."""
    mean, var, count = found
    unbiased = var * (count / (count - 1).clamp(min=1))
    running_mean.lerp_(mean.to(running_mean.dtype), factor)
    running_var.lerp_(unbiased.to(running_var.dtype), factor)


def normalised(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, found: Statistics
) -> Tensor:
    """Batch norm by the statistics of all workers."""
    mean, var, _ = found
    scale, shift = (None if p is None else p.to(mean.dtype) for p in (weight, bias))
    return F.batch_norm(x, mean, var, scale, shift, training=False, eps=eps)


def derivative(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    found: Statistics,
    group: Group,
    *,
    counts: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of input, weight and bias; `found` are mean, inverse deviation and count.

    Samples that do not `count` are not part of the statistics.
    """
    mean, inv_std, count = found
    dims = _all_but_channel(x)
    kind, x, dy = x.dtype, x.to(mean.dtype), dy.to(mean.dtype)
    x_hat = (x - _like(mean, x)) * _like(inv_std, x)
    sums = torch.stack([dy.sum(dims), (dy * x_hat).sum(dims)])
    d_bias, d_weight = sums[0].clone(), sums[1].clone()
    total = group.all_reduce(sums) / count
    scale = inv_std if weight is None else inv_std * weight
    dx = dy if not counts else dy - _like(total[0], x) - x_hat * _like(total[1], x)
    return (dx * _like(scale, x)).to(kind), d_weight, d_bias


class _SyncedNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        group: Group,
        reducer: Reducer,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        counts = reducer.weight > 0
        mean, var, count = found = global_statistics(x, group, counts=counts)
        ctx.save_for_backward(x, weight, mean, torch.rsqrt(var + eps), count)
        ctx.group, ctx.counts = group, counts
        y = normalised(x, weight, bias, eps, found)
        ctx.mark_non_differentiable(mean, var, count)
        return y, mean, var, count

    @staticmethod
    def backward(ctx: Any, dy: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, *found = ctx.saved_tensors
        dx, *affine = derivative(dy, x, weight, tuple(found), ctx.group, counts=ctx.counts)
        of_affine = (None, None) if weight is None else affine
        return dx, *of_affine, None, None, None


def global_statistics(x: Tensor, group: Group, *, counts: bool) -> Statistics:
    """Mean, biased variance and count per channel over the batches that count."""
    dims = _all_but_channel(x)
    channels = x.shape[1]
    wide = torch.promote_types(x.dtype, torch.float32)
    local = x.new_zeros(group.size, 2 * channels + 1, dtype=wide)
    if counts and x.numel():
        var, mean = torch.var_mean(x.to(wide), dims, correction=0)
        number = x.numel() // channels
        local[group.index] = torch.cat([mean, var * number, mean.new_full((1,), number)])
    gathered = group.all_reduce(local)
    means, squares, numbers = torch.split(gathered, [channels, channels, 1], dim=1)
    count = numbers.sum()
    mean = (means * numbers).sum(0) / count
    var = (squares.sum(0) + (numbers * (means - mean) ** 2).sum(0)) / count
    return mean, var, count


def _all_but_channel(x: Tensor) -> list[int]:
    return [0, *range(2, x.dim())]


def _like(per_channel: Tensor, x: Tensor) -> Tensor:
    return per_channel.view(1, -1, *[1] * (x.dim() - 2))
