# SPDX-License-Identifier: Apache-2.0
"""How senders sum a piece of a bucket: as it is, narrower, or as messages of a codec.

Sums of narrow numbers are narrow numbers, so those go through an all-reduce. MessagePool of a codec
are no numbers: everybody sends its own to all, and all add them up in the same order. With more
than two senders that is too much where a message can be divided: then each sender gets one chunk
from all, and sends on the sum, encoded again. What either encoding leaves out is kept.

`start` belongs to one thread, `go_on` and `wait` to another. All senders start the same pieces
in the same order, and bring them to an end in that order.
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

#: chunks are multiples of so many values, which codecs may treat together
_GRAIN = 256


class PendingSum(Protocol):
    """A piece on its way."""

    def go_on(self) -> None:
        """Do what the messages of the others are needed for before there is a total."""

    def wait(self) -> None:
        """Put the total where the values were."""


class Exchange(Protocol):
    """A way for senders to sum pieces."""

    def start(self, tensor: Tensor, place: SegmentPlace) -> PendingSum:
        """Send a flat piece, which nobody touches until its total is there."""

    def close(self) -> None:
        """Let go of the process groups."""


class GroupRotation:
    """Process groups that take turns at the pieces."""

    def __init__(self, groups: Sequence[dist.ProcessGroup]) -> None:
        self._groups = list(groups)
        self._taken = 0

    def take(self) -> dist.ProcessGroup:
        """The next one."""
        self._taken += 1
        return self._groups[(self._taken - 1) % len(self._groups)]

    def clear(self) -> None:
        """Let go of them."""
        self._groups.clear()


class PlainExchange:
    """Pieces are summed as they are, or in a narrower type."""

    def __init__(self, turns: GroupRotation, narrow: torch.dtype | None = None) -> None:
        self._turns = turns
        self._narrow = narrow

    def start(self, tensor: Tensor, place: SegmentPlace) -> PendingSum:
        """As in `Exchange`."""
        sent = narrowed(tensor, None if place.is_exact else self._narrow)
        return _Summed(self._turns.take().allreduce([sent]), sent, tensor)

    def close(self) -> None:
        """As in `Exchange`."""
        self._turns.clear()


@dataclasses.dataclass
class _Summed:
    work: dist.Work
    sent: Tensor
    tensor: Tensor

    def go_on(self) -> None:
        pass

    def wait(self) -> None:
        self.work.wait()
        if self.sent is not self.tensor:
            self.tensor.copy_(self.sent)


class AllGatherExchange:
    """Everybody's message goes to all."""

    def __init__(self, turns: GroupRotation, compression: Compression) -> None:
        self._turns = turns
        self._stretches = SegmentStates(compression)
        self.codec = compression.codec
        self.messages = MessagePool()

    def start(self, tensor: Tensor, place: SegmentPlace) -> PendingSum:
        """As in `Exchange`."""
        group, stretch = self._turns.take(), self._stretches.at(place, tensor.numel())
        length = self.codec.message_bytes(stretch.spans)
        mine, all_ = self.messages.take(1, length), self.messages.take(group.size(), length)
        self.codec.encode(tensor, stretch, mine[0])
        return _Gathering(self, gathered(all_, mine, group), mine, all_, place, tensor)

    def close(self) -> None:
        """As in `Exchange`."""
        self._turns.clear()


@dataclasses.dataclass
class _Gathering:
    by: AllGatherExchange
    work: Any
    mine: Tensor
    all: Tensor
    place: SegmentPlace
    tensor: Tensor

    def go_on(self) -> None:
        pass

    def wait(self) -> None:
        self.work.wait()
        spans = spans_of(self.place, self.tensor.numel())
        self.tensor.zero_()
        for message in self.all:
            self.by.codec.add(message, spans, self.tensor)
        self.by.messages.give_back(self.mine, self.all)


class TwoShotExchange:
    """Each sender sums one chunk of all messages, and sends the sum on to all."""

    def __init__(
        self, turns: GroupRotation, second: GroupRotation, compression: Compression
    ) -> None:
        """The second shots have process groups of their own, for they leave from another thread."""
        self._turns = turns
        self.second = second
        self._stretches = SegmentStates(compression)
        self.codec = compression.codec
        self.messages = MessagePool()

    def start(self, tensor: Tensor, place: SegmentPlace) -> PendingSum:
        """As in `Exchange`."""
        group = self._turns.take()
        chunks = self._chunks(tensor, place, group.size())
        longest = max(chunk.length for chunk in chunks)
        sent, came = (self.messages.take(len(chunks), longest) for _ in range(2))
        for chunk, message in zip(chunks, sent, strict=True):
            if chunk.length:
                stretch = self._stretches.at(chunk.place, chunk.values.numel())
                self.codec.encode(chunk.values, stretch, message[: chunk.length])
        work = dist.all_to_all_single(came, sent, group=group, async_op=True)
        mine = chunks[group.rank()]
        # what is kept is asked for by one thread alone
        stretch = self._stretches.of_sums(mine.place, mine.values.numel())
        return _Shots(self, work, sent, came, chunks, mine, stretch)

    def _chunks(self, tensor: Tensor, place: SegmentPlace, among: int) -> list[_Chunk]:
        values = torch.split(tensor, chunk_size(tensor.numel(), among, _GRAIN))
        chunks, behind = [], place
        for part in (*values, *[tensor[:0]] * (among - len(values))):
            spans = spans_of(behind, part.numel())
            length = self.codec.message_bytes(spans) if spans else 0
            chunks.append(_Chunk(part, behind, spans, length))
            behind = behind.behind(part.numel())
        return chunks

    def close(self) -> None:
        """As in `Exchange`."""
        self._turns.clear()
        self.second.clear()


class _Chunk(NamedTuple):
    values: Tensor
    place: SegmentPlace
    spans: Sequence[Span]
    #: of its message, 0 where it has no values
    length: int


@dataclasses.dataclass
class _Shots:
    by: TwoShotExchange
    work: Any
    sent: Tensor
    came: Tensor
    chunks: Sequence[_Chunk]
    mine: _Chunk
    stretch: CodecSegment

    def go_on(self) -> None:
        self.work.wait()
        mine, codec = self.mine, self.by.codec
        if mine.length:
            mine.values.zero_()
            for message in self.came:
                codec.add(message[: mine.length], mine.spans, mine.values)
            codec.encode(mine.values, self.stretch, self.sent[0, : mine.length])
        self.work = gathered(self.came, self.sent[:1], self.by.second.take())

    def wait(self) -> None:
        self.work.wait()
        for chunk, message in zip(self.chunks, self.came, strict=True):
            if chunk.length:
                chunk.values.zero_()
                self.by.codec.add(message[: chunk.length], chunk.spans, chunk.values)
        self.by.messages.give_back(self.sent, self.came)


class MessagePool:
    """Memory of messages, which is used again, also for shorter ones."""

    def __init__(self) -> None:
        self._free: list[Tensor] = []
        #: by the address of what was made of them
        self._taken: dict[int, Tensor] = {}
        # who takes and who gives back are two threads
        self._lock = threading.Lock()

    def take(self, count: int, length: int) -> Tensor:
        """So many messages of so many bytes."""
        with self._lock:
            memory = self._found(max(1, count * length))
            self._taken[memory.data_ptr()] = memory
        return memory[: count * length].view(count, length)

    def give_back(self, *taken: Tensor) -> None:
        """Nobody reads or writes them any more."""
        with self._lock:
            self._free.extend(self._taken.pop(messages.data_ptr()) for messages in taken)

    def _found(self, size: int) -> Tensor:
        """The smallest that is large enough; where none is, the largest makes room for it."""
        self._free.sort(key=len)
        sizes = [len(memory) for memory in self._free]
        place = bisect.bisect_left(sizes, size)
        if place < len(sizes):
            return self._free.pop(place)
        del self._free[-1:]
        return torch.empty(size, dtype=torch.uint8)


def gathered(everybody: Tensor, mine: Tensor, group: dist.ProcessGroup) -> Any:
    """Start to bring a message of each sender to all of them."""
    return all_gather_single(everybody, mine, group)
