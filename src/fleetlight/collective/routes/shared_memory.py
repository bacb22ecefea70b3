# SPDX-License-Identifier: Apache-2.0
"""Sums tensors of workers on one host through memory they share.

Gloo sends the bytes through the loopback device, which costs more than the additions. Here a worker
copies its buckets into its own arena while backward runs. When all are there, it sends a message of
a few bytes and reads the arenas of the others. The messages go through Unix sockets, which report a
dead peer immediately, and anonymous memory leaves no file behind.

An arena has two halves that take turns, round by round. No worker writes into a half that another
one still reads: before the round after next, a worker has received all messages of the next round,
and each worker sends that message only after it has read the round before.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import socket
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor
from torch.futures import Future

from fleetlight.collective.membership.diagnosis import PeerConnectionError
from fleetlight.collective.routes.route import Bucket
from fleetlight.collective.stamp import BLANK, PACKED_BYTES, GradientStamp
from fleetlight.errors import DivergedError, counted
from fleetlight.wire.shared_memory import new_shared_memory

#: tensors begin at multiples of this
ALIGN = 64
#: half of the first arena
FIRST_BYTES = 1 << 20
#: kind, round, number of tensors, checksum of their sizes and types, their bytes; then the
#: sender's stamp
_MESSAGE = struct.Struct("<cxxxIIIQ")
_ARRIVED, _REDUCED = b"A", b"R"


class SharedMemoryError(PeerConnectionError):
    """A peer of the same host is gone or too slow."""


class SharedMemory:
    """One worker's end. All workers start the same tensors in the same order."""

    def __init__(self, index: int, peers: Sequence[socket.socket | None]) -> None:
        """`peers[i]` is the connection to worker i; None at its own index."""
        self._index = index
        self._peers = {i: peer for i, peer in enumerate(peers) if peer is not None}
        self._size = len(peers)
        self._arenas = {index: Arena(FIRST_BYTES)}
        self._announced = False
        self._round = 0
        self._used = 0
        self._started: list[tuple[Tensor, int, Future[Tensor]]] = []
        self._stamps = {index: BLANK}

    def start(self, bucket: Bucket, stamp: GradientStamp = BLANK) -> Future[Tensor]:
        """Copy a bucket to where the others can read it; `finish` completes its future."""
        tensor = bucket.buffer
        self._stamps[self._index] = stamp
        place = self._used
        self._used += -(-tensor.nbytes // ALIGN) * ALIGN
        if self._used > self._mine.half:
            self._grow(2 * self._used)
        self._slot(self._index, place, tensor).copy_(tensor.view(-1))
        future: Future[Tensor] = Future()
        self._started.append((tensor, place, future))
        return future

    def finish(self) -> None:
        """Wait for the others' tensors, and replace each tensor by the sum."""
        started, self._started = self._started, []
        if not started:
            return
        try:
            self._exchange(_ARRIVED, started)
            if self._size == 2:
                self._add_the_other(started)
            else:
                self._reduce_my_parts(started)
                self._exchange(_REDUCED, started)
                self._collect_parts(started)
        finally:
            self._round, self._used = self._round + 1, 0
            for tensor, _, future in started:
                future.set_result(tensor)

    def stamps(self) -> Mapping[int, GradientStamp]:
        """The stamps of the workers in the round that has ended."""
        return self._stamps

    def close(self) -> None:
        """Release sockets and memory."""
        for peer in self._peers.values():
            peer.close()
        self._arenas.clear()

    @property
    def _mine(self) -> Arena:
        return self._arenas[self._index]

    def _slot(self, worker: int, place: int, like: Tensor) -> Tensor:
        """The flat tensor of a worker in this round, in its arena."""
        arena = self._arenas[worker]
        return arena.view(place + (self._round % 2) * arena.half, like)

    def _grow(self, half: int) -> None:
        """Replace the arena by a larger one, with the tensors of this round."""
        old = [self._slot(self._index, place, tensor) for tensor, place, _ in self._started]
        self._arenas[self._index] = Arena(half)
        self._announced = False
        for slot, (tensor, place, _) in zip(old, self._started, strict=True):
            self._slot(self._index, place, tensor).copy_(slot)

    def _add_the_other(self, started: Sequence[tuple[Tensor, int, object]]) -> None:
        [other] = self._peers
        for tensor, place, _ in started:
            # both sides get the same bits: the addition of two numbers is commutative
            tensor.view(-1).add_(self._slot(other, place, tensor))

    def _reduce_my_parts(self, started: Sequence[tuple[Tensor, int, object]]) -> None:
        """Add up one part of each tensor, in the order of the workers."""
        for tensor, place, _ in started:
            slots = [self._slot(i, place, tensor) for i in range(self._size)]
            parts = [parts_of(slot, self._size)[self._index] for slot in slots]
            total = parts[0].clone()
            for part in parts[1:]:
                total.add_(part)
            parts[self._index].copy_(total)

    def _collect_parts(self, started: Sequence[tuple[Tensor, int, object]]) -> None:
        for tensor, place, _ in started:
            for i, mine in enumerate(parts_of(tensor.view(-1), self._size)):
                mine.copy_(parts_of(self._slot(i, place, tensor), self._size)[i])

    def _exchange(self, kind: bytes, started: Sequence[tuple[Tensor, int, object]]) -> None:
        """Send a message to the others, and wait for the same message from each."""
        message = self._message(kind, [tensor for tensor, _, _ in started])
        for index, peer in self._peers.items():
            with named(index):
                if self._announced:
                    peer.send(message)
                else:
                    socket.send_fds(peer, [message], [self._mine.fd])
        self._announced = True
        for index, peer in self._peers.items():
            with named(index):
                received, fds, _, _ = socket.recv_fds(peer, len(message), 1)
            if fds:
                self._arenas[index] = Arena.of(fds[0])
            _check_same(index, received[: _MESSAGE.size], message[: _MESSAGE.size])
            self._stamps[index] = GradientStamp.unpacked(received[-PACKED_BYTES:])

    def _message(self, kind: bytes, tensors: Sequence[Tensor]) -> bytes:
        layout = ",".join(f"{tensor.dtype}{tensor.numel()}" for tensor in tensors)
        checksum = zlib.crc32(layout.encode())
        size = sum(tensor.nbytes for tensor in tensors)
        what = _MESSAGE.pack(kind, self._round & 0xFFFFFFFF, len(tensors), checksum, size)
        return what + self._stamps[self._index].packed()


class Arena:
    """Memory in two halves that other processes can map."""

    def __init__(self, half: int) -> None:
        self._map(new_shared_memory(2 * half))

    @classmethod
    def of(cls, fd: int) -> Arena:
        """Map the arena of another worker."""
        arena = object.__new__(cls)
        arena._map(fd)
        return arena

    def _map(self, fd: int) -> None:
        self.fd = fd
        size = os.fstat(fd).st_size
        self.half = size // 2
        self._memory = mmap.mmap(fd, size)
        self._views: dict[tuple[int, int, torch.dtype], Tensor] = {}

    def view(self, offset: int, like: Tensor) -> Tensor:
        """A flat tensor over the bytes at `offset`, with the size and type of another."""
        key = (offset, like.numel(), like.dtype)
        if key not in self._views:
            self._views[key] = (
                torch.frombuffer(self._memory, dtype=like.dtype, count=like.numel(), offset=offset)
                if like.numel()
                else like.new_empty(0)
            )
        return self._views[key]

    def __del__(self) -> None:
        with contextlib.suppress(OSError):
            os.close(self.fd)


def parts_of(flat: Tensor, count: int) -> list[Tensor]:
    """Split a flat tensor into nearly equal parts; some may be empty."""
    return list(torch.tensor_split(flat, count))


def _check_same(index: int, theirs: bytes, mine: bytes) -> None:
    if not theirs:
        raise SharedMemoryError(f"connection closed by worker {index}")
    if theirs != mine:
        raise DivergedError(
            f"the workers reduce different gradients: worker {index} reduces {_text(theirs)}, this "
            f"worker {_text(mine)}; they must make the same forwards, backwards and steps on the "
            "same model"
        )


def _text(message: bytes) -> str:
    _, round_, count, _, size = _MESSAGE.unpack(message)
    return f"{counted(count, 'tensor')} of {size} bytes in round {round_}"


@contextlib.contextmanager
def named(index: int) -> Iterator[None]:
    """Make errors of a connection name its worker."""
    try:
        yield
    except BlockingIOError:
        raise SharedMemoryError(f"timed out waiting for worker {index}") from None
    except OSError as error:
        raise SharedMemoryError(f"connection to worker {index}: {error.strerror}") from None
