# SPDX-License-Identifier: Apache-2.0
"""Slots of shared memory: a body stays as it was sent until its last array is gone."""

import mmap
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from fleetlight.errors import ProtocolError
from fleetlight.ps.transport.memory.body_slots import (
    MAX_SLOT_BYTES,
    MIN_BYTES,
    SLOTS,
    BodySlots,
    file_bytes,
    slot_bytes_for,
)
from fleetlight.ps.transport.protocol import ALIGNMENT

SLOT = 64 << 10


def two_ends(slot_bytes: int = SLOT) -> tuple[BodySlots, BodySlots]:
    memory = mmap.mmap(-1, file_bytes(slot_bytes))
    return (
        BodySlots(memory, slot_bytes, is_client=True),
        BodySlots(memory, slot_bytes, is_client=False),
    )


def body_of(value: int, size: int = MIN_BYTES) -> list[Any]:
    return [np.full(size, value, np.uint8).data]


def laid_out(arrays: list[Any]) -> tuple[list[Any], int]:
    """The parts of a body and its size, as frames have them."""
    parts: list[Any] = []
    for array, place in zip(arrays, places_of(arrays), strict=True):
        if gap := place - sum(map(len, parts)):
            parts.append(bytes(gap))
        parts.append(array.reshape(-1).view(np.uint8).data)
    return parts, sum(map(len, parts))


def places_of(arrays: list[Any]) -> list[int]:
    places, end = [], 0
    for array in arrays:
        places.append(end + -end % ALIGNMENT)
        end = places[-1] + array.nbytes
    return places


class Ends(RuleBasedStateMachine):
    """Both ends send bodies, and keep and drop arrays of those that they receive."""

    def __init__(self) -> None:
        super().__init__()
        self.ends = two_ends()
        self.sent = 0
        #: by end: arrays and the value that they must have
        self.kept: list[list[tuple[np.ndarray, int]]] = [[], []]

    @rule(
        end=st.integers(0, 1),
        size=st.sampled_from([MIN_BYTES, MIN_BYTES + 3, SLOT]),
        keeps=st.booleans(),
    )
    def send(self, end: int, size: int, keeps: bool) -> None:
        self.sent = (self.sent + 1) % 251
        sender, receiver = self.ends[end], self.ends[1 - end]
        sender.release()
        slot = sender.fill(body_of(self.sent, size), size)
        receiver.release()
        held = len(self.kept[1 - end])
        assert bool(slot) == (held < SLOTS)
        if slot:
            body = receiver.take(slot, size)
            assert body.size == size
            assert (body == self.sent).all()
            if keeps:
                # like the arrays of a frame: a typed view of a part
                self.kept[1 - end].append((body[8:16].view(np.int64), self.sent))
            del body
            receiver.release()

    @rule(end=st.integers(0, 1), sizes=st.lists(st.sampled_from([4, 20, SLOT // 4]), max_size=4))
    def send_written(self, end: int, sizes: list[int]) -> None:
        """Some arrays of the body are written in its slot, the others elsewhere."""
        self.sent = (self.sent + 1) % 251
        sender, receiver = self.ends[end], self.ends[1 - end]
        sender.release()
        arrays = [one for size in sizes if (one := sender.output((size,), "uint8")) is not None]
        arrays.append(np.empty(MIN_BYTES, np.uint8))
        for array in arrays:
            array.fill(self.sent)
        body, size = laid_out(arrays)
        slot = sender.fill(body, size)
        sender.end_body()
        receiver.release()
        if slot:
            received = receiver.take(slot, size)
            for array, place in zip(arrays, places_of(arrays), strict=True):
                assert (received[place : place + array.size] == self.sent).all()
            del received
            receiver.release()

    @precondition(lambda self: any(self.kept))
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        end = data.draw(st.sampled_from([end for end in (0, 1) if self.kept[end]]))
        self.kept[end].pop(data.draw(st.integers(0, len(self.kept[end]) - 1)))
        self.ends[end].release()

    @invariant()
    def kept_arrays_are_unchanged(self) -> None:
        for kept in self.kept:
            for array, value in kept:
                assert (array.view(np.uint8) == value).all()


TestEnds = Ends.TestCase
TestEnds.settings = settings(deadline=None, max_examples=40, stateful_step_count=25)


@pytest.mark.parametrize("size", [0, MIN_BYTES - 1, SLOT + 1])
def test_bodies_of_other_sizes_use_the_socket(size: int) -> None:
    client, _ = two_ends()
    assert client.fill(body_of(1, size), size) == 0


def test_parts_are_stored_one_after_another() -> None:
    client, server = two_ends()
    parts = [np.full(MIN_BYTES, 1, np.uint8).data, b"\0" * 3, np.full(5, 2, np.uint8).data]
    slot = client.fill(parts, MIN_BYTES + 8)
    assert server.take(slot, MIN_BYTES + 8)[-9:].tolist() == [1, 0, 0, 0, 2, 2, 2, 2, 2]


def test_arrays_written_in_the_slot_are_not_copied() -> None:
    client, server = two_ends()
    arrays = [server.output((3, 5), "float32"), server.output((MIN_BYTES,), "uint8")]
    arrays.append(np.full(7, 3, np.int64))
    for number, array in enumerate(arrays):
        assert array is not None
        array.fill(number)
    parts, size = laid_out(arrays)
    slot = server.fill(parts, size)
    body = client.take(slot, size)
    assert np.may_share_memory(arrays[1], server._outgoing[slot - 1])
    assert (body[:60].view(np.float32) == 0).all()
    assert (body[64 : 64 + MIN_BYTES] == 1).all()
    assert (body[64 + MIN_BYTES :].view(np.int64) == 2).all()
    # the receiver reads the memory itself
    arrays[1][0] = 99
    assert body[64] == 99


def test_arrays_written_out_of_order_use_the_socket() -> None:
    _, server = two_ends()
    one, other = (server.output((MIN_BYTES,), "uint8") for _ in range(2))
    assert one is not None
    assert other is not None
    one[:], other[:] = 1, 2
    parts, size = laid_out([other, one])
    assert server.fill(parts, size) == 0
    assert (bytes(parts[0][:1]), bytes(parts[1][:1])) == (b"\2", b"\1")


@pytest.mark.parametrize("shape", [(0, 8), (SLOT // 4 + 1,)])
def test_no_memory_for_an_array_that_is_empty_or_too_large(shape: tuple[int, ...]) -> None:
    client, _ = two_ends()
    assert client.output(shape, "float32") is None


def test_no_memory_while_the_receiver_holds_all_slots() -> None:
    client, server = two_ends()
    held = [server.take(client.fill(body_of(n), MIN_BYTES), MIN_BYTES) for n in range(SLOTS)]
    assert client.output((1,), "float32") is None
    held.pop(1)
    server.release()
    array = client.output((MIN_BYTES,), "uint8")
    assert array is not None
    array.fill(9)
    assert [(body == n).all() for n, body in zip((0, 2), held, strict=True)] == [True, True]


def test_memory_of_an_unfinished_body_is_given_again() -> None:
    client, _ = two_ends()
    first = client.output((8,), "uint8")
    client.end_body()
    assert np.may_share_memory(first, client.output((8,), "uint8"))


@pytest.mark.parametrize("slot", [SLOTS + 1, 65535])
def test_a_slot_that_does_not_exist_is_refused(slot: int) -> None:
    _, server = two_ends()
    with pytest.raises(ProtocolError, match=rf"names slot {slot} .* there are 3 slots of 65536"):
        server.take(slot, MIN_BYTES)


def test_a_body_larger_than_its_slot_is_refused() -> None:
    _, server = two_ends()
    with pytest.raises(ProtocolError, match="slot 1 with 65537 bytes"):
        server.take(1, SLOT + 1)


def test_a_slot_in_use_is_refused() -> None:
    client, server = two_ends()
    slot = client.fill(body_of(1), MIN_BYTES)
    body = server.take(slot, MIN_BYTES)
    with pytest.raises(ProtocolError, match="holds an earlier body"):
        server.take(slot, MIN_BYTES)
    assert (body == 1).all()


@pytest.mark.parametrize("nonsense", [0, 1, 255])
def test_nonsense_in_the_flags_harms_no_received_array(nonsense: int) -> None:
    """A peer may write any flags: it can only lose its own slots, or its own bodies."""
    memory = mmap.mmap(-1, file_bytes(SLOT))
    client = BodySlots(memory, SLOT, is_client=True)
    server = BodySlots(memory, SLOT, is_client=False)
    body = server.take(client.fill(body_of(7), MIN_BYTES), MIN_BYTES)
    memory[: 2 * SLOTS] = bytes([nonsense]) * (2 * SLOTS)
    server.release()
    assert server.fill(body_of(9), MIN_BYTES) == (0 if nonsense else 1)
    assert (body == 7).all()


@pytest.mark.parametrize(
    ("body", "slot"),
    [(1, 256 << 10), (256 << 10, 256 << 10), ((1 << 20) + 1, 2 << 20), (1 << 40, MAX_SLOT_BYTES)],
)
def test_slots_have_the_next_power_of_two(body: int, slot: int) -> None:
    assert slot_bytes_for(body) == slot
