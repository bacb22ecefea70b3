# SPDX-License-Identifier: Apache-2.0
"""How far the loaders of the workers are, and what is said when they are not equally far. Pure.

A worker that skips a batch alone goes on with the block after the one the others train on, and
nothing would ever tell: the gradients have the right shapes. So each worker's position travels
with its gradients.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import NamedTuple

from fleetlight.errors import DivergedError

_PACKED = struct.Struct("<qq")


class Position(NamedTuple):
    """Behind which batch of a loader a worker is; all workers together count."""

    epoch: int
    consumed: int

    def packed(self) -> bytes:
        """As `PACKED_BYTES` bytes."""
        return _PACKED.pack(*self)

    @classmethod
    def unpacked(cls, data: bytes) -> Position:
        """What `packed` has made of a position."""
        return cls(*_PACKED.unpack(data))


#: of a worker whose batches come from elsewhere; it contradicts nobody
UNKNOWN = Position(-1, -1)

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
        'worker skips all must skip: skip = fleet.all_reduce(skip, "max") tells them'
    )


def _workers(known: Mapping[int, Position], place: Position) -> str:
    indices = [index for index in sorted(known) if known[index] == place]
    shown = ", ".join(map(str, indices[:8])) + (" ..." if len(indices) > 8 else "")
    return f"worker{'s' if len(indices) > 1 else ''} {shown}"
