# SPDX-License-Identifier: Apache-2.0
"""Frames come whole, however their bytes come; their memory is used again, but not while in use."""

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


def test_free_memory_is_used_again() -> None:
    memory = _Memory()
    first = address(memory.take(SIZE))
    assert address(memory.take(SIZE // 2)) == first


def test_memory_in_use_is_left_alone() -> None:
    memory = _Memory()
    view = memory.take(SIZE)[8:].view(np.float64)[:3]
    tensor = torch.from_numpy(memory.take(SIZE)[:16])
    places = {address(memory.take(SIZE)) for _ in range(5)}
    assert address(view) - 8 not in places
    assert tensor.data_ptr() not in places


def test_what_is_too_small_does_not_stay_beside_larger_memory() -> None:
    memory = _Memory()
    for size in (SIZE, 2 * SIZE, 4 * SIZE):
        memory.take(size)
    assert [held.size for held in memory._held] == [4 * SIZE]


def test_a_caller_that_holds_the_last_answer_alternates_between_two() -> None:
    memory = _Memory()
    places = set()
    held = memory.take(SIZE)
    for _ in range(6):
        held = memory.take(SIZE)
        places.add(address(held))
    assert len(places) == 2


def test_neither_too_much_nor_too_little_is_kept() -> None:
    memory = _Memory()
    for size in (_WORTH_BYTES - 1, _KEEP_BYTES + 1):
        memory.take(size)
    assert memory._held == []
    memory.take(SIZE)
    small = memory.take(SIZE // 8)
    assert small.base is None or len(small.base) < SIZE


#: shorter than what is read at once, longer in its arrays, longer in its header
WORDS: list[tuple[m.Message, int]] = [
    (m.Heartbeat(7), 0),
    (m.Pull([m.TablePull(0, True)], dense=False), 3 * _EARLY_BYTES),
    (m.Leave("x" * 2 * _EARLY_BYTES), 5),
    (m.Heartbeat(8), 0),
]


def written() -> bytes:
    codec: MessageCodec[m.Message] = MessageCodec(m.Message)
    frames = [
        codec.encode(number, message, [np.arange(size, dtype=np.int64)] if size else [])
        for number, (message, size) in enumerate(WORDS)
    ]
    return b"".join(bytes(buffer) for frame in frames for buffer in frame)


@contextlib.contextmanager
def connected(kind: type[Wire] = Wire) -> Iterator[tuple[socket.socket, Frames]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield theirs, Frames(kind(ours, "peer"), silence_s=20.0)


def read_all(frames: Frames) -> None:
    for number, (message, size) in enumerate(WORDS):
        frame = frames.receive("a test", start_s=20.0)
        assert frame is not None
        assert (frame.request, frame.message) == (number, message)
        assert [array.tolist() for array in frame.arrays] == ([list(range(size))] if size else [])


def test_frames_that_come_at_once_are_read_one_by_one() -> None:
    with connected() as (peer, frames):
        peer.sendall(written())
        read_all(frames)
        peer.close()
        assert frames.receive("a test", start_s=20.0) is None


#: around what is read at once, and around a prefix
DRIBS = (1, PREFIX_BYTES - 1, PREFIX_BYTES, PREFIX_BYTES + 1, _EARLY_BYTES - 1, _EARLY_BYTES + 1)


@pytest.mark.parametrize("size", DRIBS)
def test_frames_of_which_little_is_read_at_once_are_whole(size: int) -> None:
    class Thirsty(Wire):
        def _receive_some(self, into: memoryview) -> int:
            return super()._receive_some(into[:size])

        def _receive_all(self, into: memoryview) -> int:
            return super()._receive_all(into[:size])

    with connected(Thirsty) as (peer, frames):
        peer.sendall(written() * 2)
        read_all(frames)
        read_all(frames)


def test_frames_that_are_sent_in_dribbles_are_whole() -> None:
    def dribble(peer: socket.socket) -> None:
        data, sizes = written() * 3, itertools.cycle(DRIBS)
        while data:
            count = peer.send(data[: next(sizes)])
            data = data[count:]

    with connected() as (peer, frames):
        sender = threading.Thread(target=dribble, args=(peer,))
        sender.start()
        for _ in range(3):
            read_all(frames)
        sender.join(20)
        assert not sender.is_alive()


def test_what_comes_with_a_frame_and_is_none_is_told() -> None:
    with connected() as (peer, frames):
        peer.sendall(written() + written()[:10])
        peer.close()
        read_all(frames)
        with pytest.raises(PeerLostError, match="in the middle of a frame"):
            frames.receive("a test", start_s=20.0)
