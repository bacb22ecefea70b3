# SPDX-License-Identifier: Apache-2.0
"""How senders sum a piece of a bucket: as it is, in half precision, or as messages of a codec.

Numbers of half precision go through an all-reduce. Messages of a codec are not numbers: each sender
sends its message to all, and all add the messages in the same order. Among more than two senders
that sends too much where a message can be divided. Then each sender sums one chunk of all messages,
encodes the sum and sends it to all (a two-shot all-reduce). What either encoding drops is kept.

`start` belongs to one thread, `advance` and `wait` to another. All senders start the same pieces in
the same order, and finish them in that order.
"""

from __future__ import annotations

import bisect
import dataclasses
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from fleetlight.collective.codecs.codec import CodecSegment, Span, narrowed
from fleetlight.collective.codecs.compression import Compression
from fleetlight.collective.routes.route_segments import (
    SegmentPlace,
    SegmentStates,
    chunk_size,
    spans_of,
)
from fleetlight.torch_compat.c10d import all_gather_single

#: chunks are multiples of this many values, so that no chunk cuts a block of a codec
_GRAIN = 256


class PendingSum(Protocol):
    """A piece whose sum is in progress."""

    def advance(self) -> None:
        """Wait for the first messages, and start to send what depends on them."""

    def wait(self) -> None:
        """Replace the values by their total."""


class Exchange(Protocol):
    """A way for senders to sum pieces."""

    def start(self, tensor: Tensor, place: SegmentPlace) -> PendingSum:
        """Send a flat piece, which callers leave alone until `wait` returns."""

    def close(self) -> None:
        """Release the process groups."""


class GroupRotation:
    """Process groups that take turns at the pieces."""

    def __init__(self, groups: Sequence[dist.ProcessGroup]) -> None:
        self._groups = list(groups)
        self._taken = 0

    def take(self) -> dist.ProcessGroup:
        """The next process group."""
        self._taken += 1
        return self._groups[(self._taken - 1) % len(self._groups)]

    def clear(self) -> None:
        """Release them."""
        self._groups.clear()


class PlainExchange:
    """Sums pieces as they are, or in a narrower type."""

    def __init__(self, turns: GroupRotation, narrow: torch.dtype | None = None) -> None:
        self._turns = turns
        self._narrow = narrow

    def start(self, tensor: Tensor, place: SegmentPlace) -> PendingSum:
        """As in `Exchange`."""
        sent = narrowed(tensor, None if place.is_exact else self._narrow)
        return _PendingAllReduce(self._turns.take().allreduce([sent]), sent, tensor)

    def close(self) -> None:
        """As in `Exchange`."""
        self._turns.clear()


@dataclasses.dataclass
class _PendingAllReduce:
    work: dist.Work
    sent: Tensor
    tensor: Tensor

    def advance(self) -> None:
        pass

    def wait(self) -> None:
        self.work.wait()
        if self.sent is not self.tensor:
            self.tensor.copy_(self.sent)


class AllGatherExchange:
    """Each sender gathers the messages of all."""

    def __init__(self, turns: GroupRotation, compression: Compression) -> None:
        self._turns = turns
        self._segments = SegmentStates(compression)
        self.codec = compression.codec
        self.messages = MessagePool()

    def start(self, tensor: Tensor, place: SegmentPlace) -> PendingSum:
        """As in `Exchange`."""
        group, segment = self._turns.take(), self._segments.at(place, tensor.numel())
        length = self.codec.message_bytes(segment.spans)
        mine, all_ = self.messages.take(1, length), self.messages.take(group.size(), length)
        self.codec.encode(tensor, segment, mine[0])
        return _PendingGather(self, all_gather_single(all_, mine, group), mine, all_, place, tensor)

    def close(self) -> None:
        """As in `Exchange`."""
        self._turns.clear()


@dataclasses.dataclass
class _PendingGather:
    by: AllGatherExchange
    work: Any
    mine: Tensor
    all: Tensor
    place: SegmentPlace
    tensor: Tensor

    def advance(self) -> None:
        pass

    def wait(self) -> None:
        self.work.wait()
        spans = spans_of(self.place, self.tensor.numel())
        self.tensor.zero_()
        for message in self.all:
            self.by.codec.add(message, spans, self.tensor)
        self.by.messages.give_back(self.mine, self.all)


class TwoShotExchange:
    """Each sender sums one chunk of all messages, and sends the sum to all."""

    def __init__(
        self, turns: GroupRotation, second: GroupRotation, compression: Compression
    ) -> None:
        """`second` has process groups of its own, since another thread sends the second shots."""
        self._turns = turns
        self.second = second
        self._segments = SegmentStates(compression)
        self.codec = compression.codec
        self.messages = MessagePool()

    def start(self, tensor: Tensor, place: SegmentPlace) -> PendingSum:
        """As in `Exchange`."""
        group = self._turns.take()
        chunks = self._chunks(tensor, place, group.size())
        longest = max(chunk.length for chunk in chunks)
        sent, received = (self.messages.take(len(chunks), longest) for _ in range(2))
        for chunk, message in zip(chunks, sent, strict=True):
            if chunk.length:
                segment = self._segments.at(chunk.place, chunk.values.numel())
                self.codec.encode(chunk.values, segment, message[: chunk.length])
        work = dist.all_to_all_single(received, sent, group=group, async_op=True)
        mine = chunks[group.rank()]
        # only this thread reads and writes what is kept
        segment = self._segments.sum_segment(mine.place, mine.values.numel())
        return _PendingShots(self, work, sent, received, chunks, mine, segment)

    def _chunks(self, tensor: Tensor, place: SegmentPlace, among: int) -> list[_Chunk]:
        values = torch.split(tensor, chunk_size(tensor.numel(), among, _GRAIN))
        chunks, rest = [], place
        for part in (*values, *[tensor[:0]] * (among - len(values))):
            spans = spans_of(rest, part.numel())
            length = self.codec.message_bytes(spans) if spans else 0
            chunks.append(_Chunk(part, rest, spans, length))
            rest = rest.after(part.numel())
        return chunks

    def close(self) -> None:
        """As in `Exchange`."""
        self._turns.clear()
        self.second.clear()


class _Chunk(NamedTuple):
    values: Tensor
    place: SegmentPlace
    spans: Sequence[Span]
    #: of its message; 0 without values
    length: int


@dataclasses.dataclass
class _PendingShots:
    by: TwoShotExchange
    work: Any
    sent: Tensor
    received: Tensor
    chunks: Sequence[_Chunk]
    mine: _Chunk
    segment: CodecSegment

    def advance(self) -> None:
        self.work.wait()
        mine, codec = self.mine, self.by.codec
        if mine.length:
            mine.values.zero_()
            for message in self.received:
                codec.add(message[: mine.length], mine.spans, mine.values)
            codec.encode(mine.values, self.segment, self.sent[0, : mine.length])
        self.work = all_gather_single(self.received, self.sent[:1], self.by.second.take())

    def wait(self) -> None:
        self.work.wait()
        for chunk, message in zip(self.chunks, self.received, strict=True):
            if chunk.length:
                chunk.values.zero_()
                self.by.codec.add(message[: chunk.length], chunk.spans, chunk.values)
        self.by.messages.give_back(self.sent, self.received)


class MessagePool:
    """Reuses the memory of messages, even for shorter ones."""

    def __init__(self) -> None:
        self._free: list[Tensor] = []
        #: by the address of the messages
        self._taken: dict[int, Tensor] = {}
        # one thread takes, another gives back
        self._lock = threading.Lock()

    def take(self, count: int, length: int) -> Tensor:
        """Memory for `count` messages of `length` bytes."""
        with self._lock:
            memory = self._found(max(1, count * length))
            self._taken[memory.data_ptr()] = memory
        return memory[: count * length].view(count, length)

    def give_back(self, *taken: Tensor) -> None:
        """Return memory that no thread reads or writes any more."""
        with self._lock:
            self._free.extend(self._taken.pop(messages.data_ptr()) for messages in taken)

    def _found(self, size: int) -> Tensor:
        """The smallest that is large enough, else new memory in place of the largest."""
        self._free.sort(key=len)
        sizes = [len(memory) for memory in self._free]
        place = bisect.bisect_left(sizes, size)
        if place < len(sizes):
            return self._free.pop(place)
        del self._free[-1:]
        return torch.empty(size, dtype=torch.uint8)
