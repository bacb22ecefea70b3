# SPDX-License-Identifier: Apache-2.0
"""Tensors in one flat buffer and back, in the order in which their values lie in memory.

Torch's reducer fills its buckets in that order. What a codec keeps of a parameter must fit,
whichever way its gradient takes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fleetlight.torch_compat import foreach


def flat_of(tensors: Sequence[Tensor], like: Sequence[Tensor]) -> Tensor:
    """A copy of the values of all, in the order of those that they are `like`."""
    lying = zip(tensors, like, strict=True)
    return torch.cat([as_it_lies(tensor, other).reshape(-1) for tensor, other in lying])


def spread(flat: Tensor, tensors: Sequence[Tensor], like: Sequence[Tensor]) -> None:
    """Put the values of a flat buffer where `flat_of` has found them."""
    lying = [as_it_lies(tensor, other) for tensor, other in zip(tensors, like, strict=True)]
    parts = torch.split(flat, [tensor.numel() for tensor in tensors])
    foreach.copy_(lying, [part.view(t.shape) for part, t in zip(parts, lying, strict=True)])


def as_it_lies(tensor: Tensor, other: Tensor) -> Tensor:
    """A view of a tensor; its last dimension is where values of another are closest in memory."""
    if other.is_contiguous() or other.dim() != tensor.dim():
        return tensor
    strides = other.stride()
    return tensor.permute(sorted(range(other.dim()), key=lambda d: -strides[d]))
