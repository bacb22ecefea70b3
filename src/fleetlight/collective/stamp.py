# SPDX-License-Identifier: Apache-2.0
"""What a worker tells of itself beside its gradients, and what is said when workers differ. Pure.

A worker that skips a batch alone goes on with the block after the one the others train on, and
nothing would ever tell: the gradients have the right shapes. So each worker's position travels
with its gradients, and a checksum of the terms that it trains on (see `agreement`).
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import NamedTuple

from fleetlight.errors import DivergedError

_PACKED = struct.Struct("<qqI")


class Position(NamedTuple):
    """Behind which batch of a loader a worker is; all workers together count."""

    epoch: int
    consumed: int


#: of a worker whose batches come from elsewhere; it contradicts nobody
UNKNOWN = Position(-1, -1)


class GradientStamp(NamedTuple):
    """What travels beside the gradients of a worker."""

    position: Position = UNKNOWN
    #: checksum of the terms
    terms: int = 0

    def packed(self) -> bytes:
        """As `PACKED_BYTES` bytes."""
        return _PACKED.pack(*self.position, self.terms)

    @classmethod
    def unpacked(cls, data: bytes) -> GradientStamp:
        """What `packed` has made of a stamp."""
        epoch, consumed, terms = _PACKED.unpack(data)
        return cls(Position(epoch, consumed), terms)


BLANK = GradientStamp()

PACKED_BYTES = _PACKED.size


def check_equally_far(positions: Mapping[int, Position]) -> None:
    """All workers must be behind the same batch; else say who is where."""
    known = {index: place for index, place in positions.items() if place != UNKNOWN}
    places = sorted(set(known.values()))
    if len(places) <= 1:
        return
    told = [
        f"{_workers(known, place)} at {place.consumed} of epoch {place.epoch}" for place in places
    ]
    raise DivergedError(
        f"the workers train on different blocks of records: {', '.join(told)}. A batch that one "
        'worker skips all must skip: skip = fleet.all_reduce(skip, "max") tells them; and batches '
        "must have one size on all"
    )


def _workers(known: Mapping[int, Position], place: Position) -> str:
    indices = [index for index in sorted(known) if known[index] == place]
    shown = ", ".join(map(str, indices[:8])) + (" ..." if len(indices) > 8 else "")
    return f"worker{'s' if len(indices) > 1 else ''} {shown}"
