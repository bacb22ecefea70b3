# SPDX-License-Identifier: Apache-2.0
"""`BodySlots`: the bodies of frames in memory that both ends of a connection map.

    flags      one byte for each slot: 1 from the send of a body until the receiver releases it
    requests   3 slots, which the client fills
    replies    3 slots, which the server fills

A sender may write arrays in a slot before the frame exists, which saves the copy (`output`).
A frame's prefix names the slot; prefix and header still go through the socket, so waits, deadlines
and the end of a peer are those of a connection without shared memory. The receiver's arrays are
views of the slot. It releases a slot once no array refers to it; until then the sender uses another
slot, and the socket where no slot is free.
"""

from __future__ import annotations

import math
import mmap
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleetlight.errors import ProtocolError
from fleetlight.ps.transport.protocol import ALIGNMENT
from fleetlight.wire.plain import Buffer

#: of each direction: a caller often keeps two bodies until the next one arrives
SLOTS = 3
#: the flags
_HEAD_BYTES = 4096
#: the socket is as fast for smaller bodies
MIN_BYTES = 16 << 10
_MIN_SLOT_BYTES, MAX_SLOT_BYTES = 256 << 10, 64 << 20


def slot_bytes_for(body: int) -> int:
    """The size of slots for bodies of this size: a power of two."""
    return min(MAX_SLOT_BYTES, max(_MIN_SLOT_BYTES, 1 << (body - 1).bit_length()))


def file_bytes(slot_bytes: int) -> int:
    """The size of the memory with all slots."""
    return _HEAD_BYTES + 2 * SLOTS * slot_bytes


class BodySlots:
    """One end's view of the memory. For one thread at a time."""

    def __init__(self, memory: mmap.mmap, slot_bytes: int, *, is_client: bool) -> None:
        self.slot_bytes = slot_bytes
        flags = np.frombuffer(memory, np.uint8, 2 * SLOTS)
        slots = [
            np.frombuffer(memory, np.uint8, slot_bytes, _HEAD_BYTES + number * slot_bytes)
            for number in range(2 * SLOTS)
        ]
        requests, replies = slice(0, SLOTS), slice(SLOTS, None)
        outgoing, incoming = (requests, replies) if is_client else (replies, requests)
        self._sent, self._received = flags[outgoing], flags[incoming]
        self._outgoing, self._incoming = slots[outgoing], slots[incoming]
        #: slots of received bodies that an array may still refer to
        self._held: list[int] = []
        #: the slot of the body that `output` gives memory for, and the end of its last array
        self._begun: int | None = None
        self._end = 0

    def output(self, shape: tuple[int, ...], dtype: str) -> NDArray[Any] | None:
        """Memory in a slot for the next array of the next body; None if there is none.

        `fill` copies no array that is at its place in the body.
        """
        kind = np.dtype(dtype)
        start = self._end + -self._end % ALIGNMENT
        end = start + math.prod(shape) * kind.itemsize
        if self._begun is None:
            self._begun = self._free()
        if self._begun is None or end == start or end > self.slot_bytes:
            return None
        self._end = end
        memory: NDArray[Any] = np.ndarray(shape, kind, self._outgoing[self._begun], start)
        return memory

    def end_body(self) -> None:
        """Give no further memory for this body."""
        self._begun, self._end = None, 0

    def fill(self, parts: Sequence[Buffer], size: int) -> int:
        """Complete a body in a free slot; returns the slot, 0 if the socket must carry it."""
        if not MIN_BYTES <= size <= self.slot_bytes:
            return 0
        number = self._free() if self._begun is None else self._begun
        if number is None:
            return 0
        slot, at = self._outgoing[number], 0
        missing: list[tuple[int, NDArray[np.uint8]]] = []
        for part in parts:
            array = np.frombuffer(part, np.uint8)
            if self._begun is None or not np.may_share_memory(array, slot):
                missing.append((at, array))
            elif not np.may_share_memory(array[:1], slot[at : at + 1]):
                # not at its place: a copy within the slot could overwrite another array
                return 0
            at += len(array)
        for at, array in missing:
            slot[at : at + len(array)] = array
        self._sent[number] = 1
        return number + 1

    def _free(self) -> int | None:
        """A slot that the receiver has released."""
        number = self._sent.tobytes().find(0)
        return None if number < 0 else number

    def take(self, slot: int, size: int) -> NDArray[np.uint8]:
        """Return the received body in a slot."""
        if not 1 <= slot <= SLOTS or size > self.slot_bytes:
            raise ProtocolError(
                f"a frame names slot {slot} with {size} bytes; there are {SLOTS} slots of "
                f"{self.slot_bytes} bytes"
            )
        number = slot - 1
        if not self._is_free(number):
            raise ProtocolError(f"a frame names slot {slot}, which holds an earlier body")
        self._held.append(number)
        return self._incoming[number][:size]

    def release(self) -> None:
        """Let the sender use the slots that no array refers to."""
        if self._held:
            self._held = [number for number in self._held if not self._released(number)]

    def _released(self, number: int) -> bool:
        if self._is_free(number):
            self._received[number] = 0
            return True
        return False

    def _is_free(self, number: int) -> bool:
        """True if no array refers to a received slot."""
        # Every view refers to the slot's array. Two references always exist: the list and the
        # argument of getrefcount.
        return sys.getrefcount(self._incoming[number]) == 2
