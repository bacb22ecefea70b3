# SPDX-License-Identifier: Apache-2.0
"""`GradientStamp`: what a worker sends beside its gradients. Pure.

A worker that skips a batch alone trains on another block of records than the others, and nothing
would show it: the gradients have the right shapes. So each worker's position travels with its
gradients, and a checksum of the terms that it trains on (see `data_parallel/consistency.py`).
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import NamedTuple

from fleetlight.errors import DivergedError

_PACKED = struct.Struct("<qqI")


class Position(NamedTuple):
    """The records of an epoch that all workers together have consumed."""

    epoch: int
    consumed: int


#: of a worker whose batches come from no sharded loader; it equals every position
UNKNOWN = Position(-1, -1)


class GradientStamp(NamedTuple):
    """The data beside the gradients of a worker."""

    position: Position = UNKNOWN
    #: checksum of the terms
    terms: int = 0

    def packed(self) -> bytes:
        """As `PACKED_BYTES` bytes."""
        return _PACKED.pack(*self.position, self.terms)

    @classmethod
    def unpacked(cls, data: bytes) -> GradientStamp:
        """The stamp that `packed` has packed."""
        epoch, consumed, terms = _PACKED.unpack(data)
        return cls(Position(epoch, consumed), terms)


BLANK = GradientStamp()

PACKED_BYTES = _PACKED.size


def check_equally_far(positions: Mapping[int, Position]) -> None:
    """Raise unless all workers are at one position; the error names the position of each."""
    known = {index: place for index, place in positions.items() if place != UNKNOWN}
    places = sorted(set(known.values()))
    if len(places) <= 1:
        return
    places_text = [
        f"{_workers(known, place)} at {place.consumed} of epoch {place.epoch}" for place in places
    ]
    raise DivergedError(
        f"the workers train on different blocks of records: {', '.join(places_text)}. If one "
        'worker skips a batch, all must skip it: skip = fleet.all_reduce(skip, "max"); and batches '
        "must have one size on all"
    )


def _workers(known: Mapping[int, Position], place: Position) -> str:
    indices = [index for index in sorted(known) if known[index] == place]
    shown = ", ".join(map(str, indices[:8])) + (" ..." if len(indices) > 8 else "")
    return f"worker{'s' if len(indices) > 1 else ''} {shown}"
