# SPDX-License-Identifier: Apache-2.0
"""Batch norm over the batches of all workers, as two operations of a program.

Each exchanges statistics with the workers of the active `Reductions`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fleetlight.collective.data_parallel.batch_norm import (
    derivative,
    global_statistics,
    move_running,
    normalised,
)
from fleetlight.static.ops.reductions import reductions

_library: Any = torch.library.Library("fleetlight", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define(
    "synced_norm(Tensor x, Tensor? weight, Tensor? bias, Tensor(a!)? running_mean, "
    "Tensor(b!)? running_var, float momentum, float eps) -> (Tensor, Tensor, Tensor, Tensor)"
)
_library.define(
    "synced_norm_backward(Tensor gradient, Tensor x, Tensor? weight, Tensor mean, "
    "Tensor inv_std, Tensor count) -> (Tensor, Tensor, Tensor)"
)

#: the output, and for backward: mean and inverse deviation by channel, and the number of values
SYNCED_NORM = torch.ops.fleetlight.synced_norm.default
#: gradients of the input, the weight and the bias
SYNCED_NORM_BACKWARD = torch.ops.fleetlight.synced_norm_backward.default


def _norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    momentum: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    now = reductions()
    mean, var, count = found = global_statistics(x, now.workers, counts=now.counts)
    if running_mean is not None and running_var is not None:
        move_running(running_mean, running_var, found, momentum)
    y = normalised(x, weight, bias, eps, found)
    return y, mean, torch.rsqrt(var + eps), count.clone()


def _backward(
    gradient: Tensor,
    x: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    inv_std: Tensor,
    count: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    now = reductions()
    found = mean, inv_std, count
    return derivative(gradient, x, weight, found, now.workers, counts=now.counts)


def _norm_of_fakes(x: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    wide = torch.promote_types(x.dtype, torch.float32)
    by_channel = x.new_empty(x.shape[1], dtype=wide)
    return torch.empty_like(x), by_channel, torch.empty_like(by_channel), by_channel.new_empty(())


def _backward_of_fakes(
    gradient: Tensor, x: Tensor, weight: Tensor | None, mean: Tensor, *_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(mean), torch.empty_like(mean)


for _name, _real, _fake in (
    ("synced_norm", _norm, _norm_of_fakes),
    ("synced_norm_backward", _backward, _backward_of_fakes),
):
    for _backend in ("CPU", "CUDA"):
        _library.impl(_name, _real, _backend)
    torch.library.register_fake(f"fleetlight::{_name}", _fake, lib=_library)
