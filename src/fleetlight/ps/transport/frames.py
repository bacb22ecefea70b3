# SPDX-License-Identifier: Apache-2.0
"""Whole frames over a wire."""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from fleetlight.errors import ProtocolError
from fleetlight.ps.messages import Message
from fleetlight.ps.transport.protocol import (
    BODY_LIMIT,
    PREFIX_BYTES,
    Array,
    Codec,
    Prefix,
    check_start,
    views,
)
from fleetlight.ps.transport.wire import Wire

#: smaller memory costs nothing, larger memory is given back after each frame
_WORTH_BYTES, _KEEP_BYTES = 1 << 16, 256 << 20

_CODEC: Codec[Message] = Codec(Message)


@dataclasses.dataclass(frozen=True)
class Frame:
    """What came over a wire."""

    request: int
    message: Message
    arrays: list[Array]


class Frames:
    """Sends and receives frames; what is wrong with one is said together with who sent it."""

    def __init__(self, wire: Wire, silence_s: float) -> None:
        self.wire = wire
        self._silence_s = silence_s
        self._memory = _Memory()

    def send(self, request: int, message: Message, arrays: Sequence[Array], operation: str) -> None:
        """Send one frame; returns when the kernel has all of it."""
        self.wire.write(_CODEC.encode(request, message, arrays), operation, self._silence_s)

    def receive(
        self,
        operation: str,
        *,
        start_s: float = math.inf,
        until: float = math.inf,
        body_limit: int = BODY_LIMIT,
    ) -> Frame | None:
        """The next frame, None when the peer has closed the connection instead.

        `start_s` bounds the wait for its first byte, `until` the whole of it.
        """
        try:
            prefix = self._prefix(operation, start_s, until, body_limit)
            return None if prefix is None else self._rest(prefix, operation, until)
        except ProtocolError as error:
            raise ProtocolError(f"{self.wire.peer}: {error}") from None

    def _prefix(
        self, operation: str, start_s: float, until: float, body_limit: int
    ) -> Prefix | None:
        data = bytearray(PREFIX_BYTES)
        count = self.wire.read(memoryview(data), operation, start_s, until)
        if count == 0:
            return None
        while count < PREFIX_BYTES:
            # a stranger may send less than we wait for
            check_start(bytes(data[:count]))
            more = self.wire.read(memoryview(data)[count:], operation, self._silence_s, until)
            if more == 0:
                raise self.wire.lost(operation, "it closed the connection in the middle of a frame")
            count += more
        return Prefix.parse(bytes(data), body_limit)

    def _rest(self, prefix: Prefix, operation: str, until: float) -> Frame:
        data = bytearray(prefix.header)
        self.wire.read_all(memoryview(data), operation, self._silence_s, until)
        header = _CODEC.decode_header(prefix, data)
        body = self._memory.take(prefix.body)
        self.wire.read_all(body.data, operation, self._silence_s, until)
        return Frame(header.request, header.message, views(header.places, body))


class _Memory:
    """Memory that bodies are received into, used again once nobody holds an array of it.

    Fresh memory costs a page fault for every 4 KiB: as much as copying it.
    """

    def __init__(self) -> None:
        # two: a caller usually holds the last answer until the next one is there
        self._held: list[NDArray[np.uint8]] = []

    def take(self, size: int) -> NDArray[np.uint8]:
        """So many bytes that nobody else refers to."""
        for number in range(len(self._held)):
            memory = self._held[number]
            # Every view of an array refers to the array itself. The three references that are
            # always there: the list's, this name's and that of the count.
            if size <= memory.size <= 4 * size and sys.getrefcount(memory) == 3:
                self._held.append(self._held.pop(number))
                return memory[:size]
        try:
            memory = np.empty(size, np.uint8)
        except MemoryError:
            raise ProtocolError(f"no memory for a frame with a body of {size} bytes") from None
        if _WORTH_BYTES <= size <= _KEEP_BYTES:
            self._held = [*self._held[-1:], memory]
        return memory
