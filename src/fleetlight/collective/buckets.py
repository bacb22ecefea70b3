# SPDX-License-Identifier: Apache-2.0
"""Which gradients travel together: a pure function of their order, types and sizes."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Sequence

MIB = 1 << 20


@dataclasses.dataclass(frozen=True)
class BucketLimits:
    """How much a bucket may hold. The first is small, so that the first all-reduce starts early."""

    bytes: int = 25 * MIB
    first_bytes: int = MIB
    #: most gradients in one bucket; 0: no limit
    count: int = 0

    @classmethod
    def of(cls, *, fuse: bool, mib: float, count: int) -> BucketLimits:
        """The limits a strategy asks for; without fusion every gradient travels alone."""
        if not fuse:
            return cls(bytes=1, first_bytes=1, count=1)
        size = max(1, int(mib * MIB))
        return cls(bytes=size, first_bytes=min(MIB, size), count=count)


def assign(
    sizes: Sequence[int], kinds: Sequence[Hashable], limits: BucketLimits
) -> list[list[int]]:
    """Split gradients, given in the order they are produced, into buckets of indices.

    Gradients of different kinds (dtype, device, sparse, coded or not) never share a bucket. A
    bucket is closed by the gradient that reaches a limit, so it may exceed it by that gradient.
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
    # ready when its last gradient is: that is the order in which buckets are issued
    return sorted(closed, key=lambda bucket: bucket[-1])
