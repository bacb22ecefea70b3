# SPDX-License-Identifier: Apache-2.0
"""Reads and writes whole frames on a wire."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fleetlight.errors import ProtocolError
from fleetlight.ps.messages import Message
from fleetlight.ps.transport.memory.body_slots import MIN_BYTES, BodySlots, slot_bytes_for
from fleetlight.ps.transport.memory.memory_budget import UNLIMITED, MemoryBudget
from fleetlight.ps.transport.protocol import (
    BODY_LIMIT,
    HEADER_LIMIT,
    PREFIX_BYTES,
    Array,
    MessageCodec,
    Prefix,
    check_start,
    views,
)
from fleetlight.wire.plain import Wire

#: buffers of these sizes are reused; smaller ones are cheap, larger ones are freed after each frame
_WORTH_BYTES, _KEEP_BYTES = 1 << 16, 256 << 20

#: bytes of the first read: the prefix, the header, all of a short frame
_EARLY_BYTES = 4096

_EMPTY: NDArray[np.uint8] = np.empty(0, np.uint8)
_ANY = Prefix(HEADER_LIMIT, BODY_LIMIT)
_CODEC: MessageCodec[Message] = MessageCodec(Message)


class Frame(NamedTuple):
    """A received frame."""

    request: int
    message: Message
    arrays: list[Array]


class Frames:
    """Sends and receives frames; errors name the peer."""

    def __init__(self, wire: Wire, silence_s: float, budget: MemoryBudget = UNLIMITED) -> None:
        """`budget` is the memory budget of all connections."""
        self.wire = wire
        self._budget = budget
        self._silence_s = silence_s
        self._memory = _Memory()
        self._scratch = memoryview(bytearray(_EARLY_BYTES))
        #: bytes already read beyond the prefix
        self._early = b""
        #: bodies in memory that the peer shares
        self.slots: BodySlots | None = None
        #: the largest body that the wire has carried
        self.largest_body = 0

    def send(self, request: int, message: Message, arrays: Sequence[Array], operation: str) -> None:
        """Send one frame; return when the kernel has all of it."""
        slots = self.slots
        if slots is None:
            parts = _CODEC.encode(request, message, arrays)
        else:
            slots.release()
            try:
                parts = _CODEC.encode(request, message, arrays, slots.fill)
            finally:
                slots.end_body()
        self.wire.write(parts, operation, self._silence_s)

    def output(self, shape: tuple[int, ...], dtype: str) -> Array | None:
        """Memory for the next array of the next frame; None: the caller allocates it.

        `send` does not copy arrays that are there, if they are its first ones in this order.
        """
        return None if self.slots is None else self.slots.output(shape, dtype)

    def wanted_slot(self, body: int) -> int:
        """The size of slots for this body and those the wire has carried; 0: no new slots."""
        largest = max(body, self.largest_body)
        wanted = slot_bytes_for(largest) if largest >= MIN_BYTES else 0
        present = 0 if self.slots is None else self.slots.slot_bytes
        return wanted if wanted > present else 0

    def receive(
        self,
        operation: str,
        *,
        start_s: float = math.inf,
        until: float = math.inf,
        most: Prefix = _ANY,
    ) -> Frame | None:
        """Receive the next frame; None when the peer closed the connection.

        Arrays of earlier frames may refer to shared memory, which the peer gets back here.

        `start_s` bounds the wait for the first byte, `until` the whole frame, and `most` the size
        of its parts.
        """
        if self.slots is not None:
            self.slots.release()
        try:
            return self._next(operation, start_s, until, most)
        except ProtocolError as error:
            raise ProtocolError(f"{self.wire.peer}: {error}") from None

    def _next(self, operation: str, start_s: float, until: float, most: Prefix) -> Frame | None:
        prefix = self._prefix(operation, start_s, until, most)
        if prefix is None:
            return None
        header = _CODEC.decode_header(prefix, self._header(prefix.header, operation, until))
        body = self._body(prefix, operation, until) if prefix.body or prefix.slot else _EMPTY
        return Frame(header.request, header.message, views(header.places, body))

    def _header(self, size: int, operation: str, until: float) -> bytes | bytearray:
        early = self._early
        if len(early) >= size:
            self._early = early[size:]
            return early[:size]
        data = bytearray(size)
        self._fill(memoryview(data), operation, until)
        return data

    def _body(self, prefix: Prefix, operation: str, until: float) -> NDArray[np.uint8]:
        size = prefix.body
        if prefix.slot:
            if self.slots is None:
                raise ProtocolError(f"a frame names slot {prefix.slot}, but no memory is shared")
            return self.slots.take(prefix.slot, size)
        self.largest_body = max(self.largest_body, size)
        body = self._memory.used_before(size)
        if body is not None:
            self._fill(body.data, operation, until)
            return body
        with self._budget.claimed(size, self._silence_s):
            body = self._memory.fresh(size)
            self._fill(body.data, operation, until)
        return body

    def _prefix(self, operation: str, start_s: float, until: float, most: Prefix) -> Prefix | None:
        start, self._early = self._early, b""
        while len(start) < PREFIX_BYTES:
            # an unknown client may send less than a prefix
            check_start(start)
            limit_s = self._silence_s if start else start_s
            count = self.wire.read(self._scratch, operation, limit_s, until)
            if count == 0 and not start:
                return None
            if count == 0:
                raise self.wire.lost(operation, "it closed the connection in the middle of a frame")
            start += bytes(self._scratch[:count])
        self._early = start[PREFIX_BYTES:]
        return Prefix.parse(start[:PREFIX_BYTES], most.body, most.header)

    def _fill(self, into: memoryview, operation: str, until: float) -> None:
        """Fill from the bytes already read, then from the wire."""
        if self._early:
            early = self._early[: len(into)]
            self._early = self._early[len(early) :]
            into[: len(early)] = early
            into = into[len(early) :]
        if into:
            self.wire.read_all(into, operation, self._silence_s, until)


class _Memory:
    """Receive buffers, reused once no array refers to them.

    New memory costs a page fault per 4 KiB, as much as copying it.
    """

    def __init__(self) -> None:
        # two: a caller usually holds a reply until the next one arrives
        self._held: list[NDArray[np.uint8]] = []

    def take(self, size: int) -> NDArray[np.uint8]:
        """Return a buffer that no array refers to."""
        memory = self.used_before(size)
        return self.fresh(size) if memory is None else memory

    def used_before(self, size: int) -> NDArray[np.uint8] | None:
        """Return a buffer that is free again, if one fits."""
        for number in range(len(self._held)):
            memory = self._held[number]
            # Every view refers to the array itself. Three references always exist: the list, this
            # name and the argument of getrefcount.
            if size <= memory.size <= 4 * size and sys.getrefcount(memory) == 3:
                self._held.append(self._held.pop(number))
                return memory[:size]
        return None

    def fresh(self, size: int) -> NDArray[np.uint8]:
        """Allocate a buffer."""
        # drop buffers that have become too small
        self._held = [held for held in self._held if held.size >= size]
        try:
            memory = np.empty(size, np.uint8)
        except MemoryError:
            raise ProtocolError(f"no memory for a frame with a body of {size} bytes") from None
        if _WORTH_BYTES <= size <= _KEEP_BYTES:
            self._held = [*self._held[-1:], memory]
        return memory
