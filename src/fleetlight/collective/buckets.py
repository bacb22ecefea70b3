# SPDX-License-Identifier: Apache-2.0
"""Which gradients travel together, by their order, types and sizes; and their flat buffers.

A buffer has values in the order of their memory, as torch's reducer fills its buckets. So what a
codec keeps of a parameter fits whichever way its gradient travels.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fleetlight.torch_compat.optimizers import foreach_copy_

MIB = 1 << 20


class ParameterSlice(NamedTuple):
    """A parameter's values in a bucket."""

    name: str
    size: int


@dataclasses.dataclass(frozen=True)
class BucketLimits:
    """The size of buckets. The first is small, so that the first all-reduce starts early."""

    bytes: int = 25 * MIB
    first_bytes: int = MIB
    #: most gradients in one bucket; 0: no limit
    count: int = 0

    @classmethod
    def of(cls, *, fuse: bool, mib: float, count: int) -> BucketLimits:
        """The limits of a strategy; without fusion each gradient travels alone."""
        if not fuse:
            return cls(bytes=1, first_bytes=1, count=1)
        size = max(1, int(mib * MIB))
        return cls(bytes=size, first_bytes=min(MIB, size), count=count)


def assign(
    sizes: Sequence[int], kinds: Sequence[Hashable], limits: BucketLimits
) -> list[list[int]]:
    """Split gradients, given in the order they are produced, into buckets of indices.

    Gradients of different kinds (dtype, device, sparse, coded or not) never share a bucket. The
    gradient that reaches a limit closes a bucket, which may exceed the limit by that gradient.
    """
    closed: list[list[int]] = []
    open_buckets: dict[Hashable, list[int]] = {}
    held: dict[Hashable, int] = {}
    for index, (size, kind) in enumerate(zip(sizes, kinds, strict=True)):
        bucket = open_buckets.setdefault(kind, [])
        bucket.append(index)
        held[kind] = held.get(kind, 0) + size
        limit = limits.bytes if closed else limits.first_bytes
        if held[kind] >= limit or len(bucket) == limits.count:
            closed.append(open_buckets.pop(kind))
            held[kind] = 0
    closed += open_buckets.values()
    # in the order in which backward completes the buckets
    return sorted(closed, key=lambda bucket: bucket[-1])


def flat_of(tensors: Sequence[Tensor], like: Sequence[Tensor]) -> Tensor:
    """Copy tensors into one buffer, in the memory order of the tensors they are `like`."""
    lying = zip(tensors, like, strict=True)
    return torch.cat([as_it_lies(tensor, other).reshape(-1) for tensor, other in lying])


def spread(flat: Tensor, tensors: Sequence[Tensor], like: Sequence[Tensor]) -> None:
    """Copy the values of a flat buffer back to where `flat_of` found them."""
    lying = [as_it_lies(tensor, other) for tensor, other in zip(tensors, like, strict=True)]
    parts = torch.split(flat, [tensor.numel() for tensor in tensors])
    foreach_copy_(lying, [part.view(t.shape) for part, t in zip(parts, lying, strict=True)])


def as_it_lies(tensor: Tensor, other: Tensor) -> Tensor:
    """View a tensor with its dimensions in the memory order of another."""
    if other.is_contiguous() or other.dim() != tensor.dim():
        return tensor
    strides = other.stride()
    return tensor.permute(sorted(range(other.dim()), key=lambda d: -strides[d]))
