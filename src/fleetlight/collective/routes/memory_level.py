# SPDX-License-Identifier: Apache-2.0
"""One level of a hierarchy in memory that the workers of a group share.

A tensor goes up: each worker copies it into its own arena and sends `A`. With the tensors of all
workers there, each adds up one part in the leader's arena and sends `P` to the leader. The next
level of the leader reads the sum there, and replaces it by the total. The total comes down: the
leader sends `R`, and each worker copies it out.

No worker writes where another one still reads, since the halves of the arenas take turns round by
round, as in `shared_memory`: a round begins when all totals of the last one have come down.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import zlib
from collections import deque
from collections.abc import Mapping

from torch import Tensor

from fleetlight.collective.routes.shared_memory import (
    ALIGN,
    FIRST_BYTES,
    Arena,
    SharedMemoryError,
    named,
    parts_of,
)
from fleetlight.errors import DivergedError

#: kind, number of earlier tensors, checksum of type and size, bytes
_MESSAGE = struct.Struct("<cxxxIIQ")
_ARRIVED, _PART, _RETURNED = b"A", b"P", b"R"


class MemoryLevel:
    """One worker's end. All workers of the group bring the same tensors up, then down."""

    def __init__(self, index: int, peers: Mapping[int, socket.socket]) -> None:
        """`peers` are connections to the others of the group; the lowest index leads."""
        self._index = index
        self._peers = dict(peers)
        self._members = sorted([index, *peers])
        self._leader = self._members[0]
        #: a round that needs more memory adds arenas, the same for all workers
        self._arenas: dict[int, list[Arena]] = {i: [] for i in self._members}
        self._halves: list[int] = []
        self._round = 0
        self._at = (0, 0)
        self._ups = 0
        self._downs = 0
        #: the sums of this round
        self._sums: deque[Tensor] = deque()

    def up(self, tensor: Tensor) -> Tensor | None:
        """As in `Level`."""
        sheet, place = self._place_for(tensor.nbytes)
        number, self._ups = self._ups, self._ups + 1
        self._share(sheet, place, tensor, _message(_ARRIVED, number, tensor))
        slots = [self._slot(i, sheet, place, tensor) for i in self._members]
        self._add_my_part(slots)
        self._sums.append(slots[0])
        message = _message(_PART, number, tensor)
        if self._index != self._leader:
            self._send(self._leader, message)
            return None
        for peer in self._peers:
            self._expect(peer, message)
        return slots[0]

    def down(self, tensor: Tensor) -> None:
        """As in `Level`."""
        total = self._sums.popleft()
        message = _message(_RETURNED, self._downs, tensor)
        self._downs += 1
        if self._index == self._leader:
            for peer in self._peers:
                self._send(peer, message)
        else:
            self._expect(self._leader, message)
        tensor.copy_(total)

    def end_round(self) -> None:
        """As in `Level`."""
        self._round, self._at = self._round + 1, (0, 0)
        self._sums.clear()

    def interrupt(self) -> None:
        """As in `Level`."""
        for peer in self._peers.values():
            with contextlib.suppress(OSError):
                peer.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Release sockets and memory."""
        for peer in self._peers.values():
            peer.close()
        self._sums.clear()
        self._arenas.clear()

    def _place_for(self, nbytes: int) -> tuple[int, int]:
        """The arena and the offset in its half, the same on all workers."""
        size = -(-nbytes // ALIGN) * ALIGN
        sheet, place = self._at
        while sheet < len(self._halves) and place + size > self._halves[sheet]:
            sheet, place = sheet + 1, 0
        if sheet == len(self._halves):
            self._halves.append(max(size, 2 * self._halves[-1] if self._halves else FIRST_BYTES))
        self._at = (sheet, place + size)
        return sheet, place

    def _slot(self, member: int, sheet: int, place: int, like: Tensor) -> Tensor:
        arena = self._arenas[member][sheet]
        return arena.view(place + (self._round % 2) * arena.half, like)

    def _share(self, sheet: int, place: int, tensor: Tensor, message: bytes) -> None:
        """Copy a tensor to where the others can read it, and wait for theirs."""
        mine = self._arenas[self._index]
        fds = []
        if sheet == len(mine):
            mine.append(Arena(self._halves[sheet]))
            fds.append(mine[sheet].fd)
        self._slot(self._index, sheet, place, tensor).copy_(tensor)
        for peer in self._peers:
            self._send(peer, message, fds)
        for peer in self._peers:
            self._arenas[peer] += [Arena.of(fd) for fd in self._expect(peer, message)]

    def _add_my_part(self, slots: list[Tensor]) -> None:
        """Add up one part in the leader's tensor, in the order of the workers."""
        mine = self._members.index(self._index)
        total, *others = [parts_of(slot, len(slots))[mine] for slot in slots]
        for other in others:
            total.add_(other)

    def _send(self, index: int, message: bytes, fds: list[int] | None = None) -> None:
        with named(index):
            socket.send_fds(self._peers[index], [message], fds or [])

    def _expect(self, index: int, message: bytes) -> list[int]:
        """Wait for this message of a worker; returns the descriptors sent with it."""
        with named(index):
            received, fds, _, _ = socket.recv_fds(self._peers[index], len(message), 1)
        if not received:
            raise SharedMemoryError(f"connection closed by worker {index}")
        if received != message:
            raise DivergedError(
                f"the workers reduce different gradients: worker {index} {_text(received)}, this "
                f"worker {_text(message)}; they must make the same forwards, backwards and steps "
                "on the same model"
            )
        return fds


def _message(kind: bytes, number: int, tensor: Tensor) -> bytes:
    layout = zlib.crc32(f"{tensor.dtype}{tensor.numel()}".encode())
    return _MESSAGE.pack(kind, number & 0xFFFFFFFF, layout, tensor.nbytes)


def _text(message: bytes) -> str:
    kind, number, _, nbytes = _MESSAGE.unpack(message)
    does = {_ARRIVED: "brings", _PART: "has added to", _RETURNED: "takes back"}[kind]
    return f"{does} tensor {number}, of {nbytes} bytes"
