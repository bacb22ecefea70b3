# SPDX-License-Identifier: Apache-2.0
"""Frames: received whole from any pieces; receive memory is reused only when free."""

from __future__ import annotations

import contextlib
import itertools
import socket
import threading
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from fleetlight.errors import PeerLostError
from fleetlight.ps import messages as m
from fleetlight.ps.transport.frames import _EARLY_BYTES, _KEEP_BYTES, _WORTH_BYTES, Frames, _Memory
from fleetlight.ps.transport.protocol import PREFIX_BYTES, MessageCodec
from fleetlight.wire.plain import Wire

SIZE = 4 * _WORTH_BYTES


def address(array: np.ndarray) -> int:  # type: ignore[type-arg]
    return int(array.__array_interface__["data"][0])


def test_free_memory_is_reused() -> None:
    memory = _Memory()
    first = address(memory.take(SIZE))
    assert address(memory.take(SIZE // 2)) == first


def test_memory_in_use_is_not_reused() -> None:
    memory = _Memory()
    view = memory.take(SIZE)[8:].view(np.float64)[:3]
    tensor = torch.from_numpy(memory.take(SIZE)[:16])
    places = {address(memory.take(SIZE)) for _ in range(5)}
    assert address(view) - 8 not in places
    assert tensor.data_ptr() not in places


def test_larger_memory_replaces_smaller_memory() -> None:
    memory = _Memory()
    for size in (SIZE, 2 * SIZE, 4 * SIZE):
        memory.take(size)
    assert [held.size for held in memory._held] == [4 * SIZE]


def test_a_caller_that_holds_a_reply_alternates_between_two_buffers() -> None:
    memory = _Memory()
    places = set()
    held = memory.take(SIZE)
    for _ in range(6):
        held = memory.take(SIZE)
        places.add(address(held))
    assert len(places) == 2


def test_very_large_and_very_small_memory_is_not_kept() -> None:
    memory = _Memory()
    for size in (_WORTH_BYTES - 1, _KEEP_BYTES + 1):
        memory.take(size)
    assert memory._held == []
    memory.take(SIZE)
    small = memory.take(SIZE // 8)
    assert small.base is None or len(small.base) < SIZE


#: shorter than one early read; with longer arrays; with a longer header
MESSAGES: list[tuple[m.Message, int]] = [
    (m.Heartbeat(7), 0),
    (m.Pull([m.TablePull(0, True)], dense=False), 3 * _EARLY_BYTES),
    (m.Leave("x" * 2 * _EARLY_BYTES), 5),
    (m.Heartbeat(8), 0),
]


def encoded() -> bytes:
    codec: MessageCodec[m.Message] = MessageCodec(m.Message)
    frames = [
        codec.encode(number, message, [np.arange(size, dtype=np.int64)] if size else [])
        for number, (message, size) in enumerate(MESSAGES)
    ]
    return b"".join(bytes(buffer) for frame in frames for buffer in frame)


@contextlib.contextmanager
def connected(kind: type[Wire] = Wire) -> Iterator[tuple[socket.socket, Frames]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield theirs, Frames(kind(ours, "peer"), silence_s=20.0)


def read_all(frames: Frames) -> None:
    for number, (message, size) in enumerate(MESSAGES):
        frame = frames.receive("a test", start_s=20.0)
        assert frame is not None
        assert (frame.request, frame.message) == (number, message)
        assert [array.tolist() for array in frame.arrays] == ([list(range(size))] if size else [])


def test_frames_that_arrive_together_are_read_one_by_one() -> None:
    with connected() as (peer, frames):
        peer.sendall(encoded())
        read_all(frames)
        peer.close()
        assert frames.receive("a test", start_s=20.0) is None


#: around the size of an early read, and around a prefix
SIZES = (1, PREFIX_BYTES - 1, PREFIX_BYTES, PREFIX_BYTES + 1, _EARLY_BYTES - 1, _EARLY_BYTES + 1)


@pytest.mark.parametrize("size", SIZES)
def test_frames_read_in_small_pieces_are_whole(size: int) -> None:
    class SlowWire(Wire):
        def _receive_some(self, into: memoryview) -> int:
            return super()._receive_some(into[:size])

        def _receive_all(self, into: memoryview) -> int:
            return super()._receive_all(into[:size])

    with connected(SlowWire) as (peer, frames):
        peer.sendall(encoded() * 2)
        read_all(frames)
        read_all(frames)


def test_frames_sent_in_small_pieces_are_whole() -> None:
    def send_in_pieces(peer: socket.socket) -> None:
        data, sizes = encoded() * 3, itertools.cycle(SIZES)
        while data:
            count = peer.send(data[: next(sizes)])
            data = data[count:]

    with connected() as (peer, frames):
        sender = threading.Thread(target=send_in_pieces, args=(peer,))
        sender.start()
        for _ in range(3):
            read_all(frames)
        sender.join(20)
        assert not sender.is_alive()


def test_a_partial_frame_at_the_end_is_an_error() -> None:
    with connected() as (peer, frames):
        peer.sendall(encoded() + encoded()[:10])
        peer.close()
        read_all(frames)
        with pytest.raises(PeerLostError, match="in the middle of a frame"):
            frames.receive("a test", start_s=20.0)
