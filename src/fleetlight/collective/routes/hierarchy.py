# SPDX-License-Identifier: Apache-2.0
"""Hierarchical all-reduce: workers of a host sum first, and only leaders send to other hosts.

The senders sum by an exchange, which may encode what it sends. Without levels, all workers send.

A thread brings tensors up, in pieces and in the order in which they are started: while a piece is
on the network, the host sums the next one and backward continues. `finish` brings the totals down,
on the thread that waits for them. Each connection has one user at a time, since nothing comes down
before all pieces are up.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from fleetlight.collective.routes.exchange import Exchange, PendingSum
from fleetlight.collective.routes.process_groups import packed_stamps, unpacked_stamps
from fleetlight.collective.routes.route import Bucket
from fleetlight.collective.routes.route_segments import SegmentPlace
from fleetlight.collective.stamp import GradientStamp

#: the size of a piece; smaller pieces overlap more, larger ones have fewer waits
PIECE_BYTES = 4 << 20
#: how long the thread may take to end after its waits were interrupted
_END_S = 5.0


class Level(Protocol):
    """This worker's group at one level."""

    def up(self, tensor: Tensor) -> Tensor | None:
        """Sum a flat tensor over the group; returns the sum to the leader, None to the others."""

    def down(self, tensor: Tensor) -> None:
        """Write the total of the oldest tensor that is up into `tensor`.

        The leader has put the total where `up` returned the sum.
        """

    def end_round(self) -> None:
        """Called when all tensors that went up have come down."""

    def interrupt(self) -> None:
        """End the waits of another thread, as far as possible."""

    def close(self) -> None:
        """Release connections and memory."""


class GroupLevel:
    """A level whose workers sum through a process group, where they cannot share memory."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def up(self, tensor: Tensor) -> Tensor | None:
        """As in `Level`; rank 0 of the process group leads."""
        self._group.reduce(tensor, 0).wait()
        return tensor if self._group.rank() == 0 else None

    def down(self, tensor: Tensor) -> None:
        """As in `Level`."""
        self._group.broadcast(tensor, 0).wait()

    def end_round(self) -> None:
        """Nothing to do."""

    def interrupt(self) -> None:
        """Nothing to do: the process group's own deadline ends its waits."""

    def close(self) -> None:
        """Nothing to do: the process group belongs to `Group`."""


@dataclasses.dataclass
class _Piece:
    """A part of a tensor on its way up."""

    tensor: Tensor
    #: where it lies in its bucket
    place: SegmentPlace
    #: the tensor of this worker at each of its levels
    sums: list[Tensor] = dataclasses.field(default_factory=list)
    #: done when it is up; the result is the sum among the senders, where this worker is one
    up: concurrent.futures.Future[Any] = dataclasses.field(
        default_factory=concurrent.futures.Future
    )


class Hierarchy:
    """One worker's end. All workers start the same tensors in the same order."""

    def __init__(
        self,
        index: int,
        size: int,
        levels: Sequence[Level],
        plain: Exchange,
        coded: Exchange | None = None,
        closed: Callable[[], None] = lambda: None,
    ) -> None:
        """`levels` are this worker's, lowest first. A worker that leads in all of them sends.

        It sends by `coded` where a bucket names its parameters, else by `plain`. No other code may
        use the process groups before `closed` is called: it would change the order of messages.
        """
        self._index, self._size = index, size
        self._levels = list(levels)
        self._plain, self._coded = plain, coded
        self._closed = closed
        self._pieces: list[_Piece] = []
        self._started: list[tuple[Tensor, Future[Tensor]]] = []
        self._stamps: Tensor | None = None
        self._failure: Exception | None = None
        self._pieces_up: queue.SimpleQueue[_Piece | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._bring_up, name="fleet-hierarchy", daemon=True)
        self._thread.start()

    def start(self, bucket: Bucket, stamp: GradientStamp) -> Future[Tensor]:
        """Start to bring a bucket up; `finish` completes its future."""
        if not self._started:
            # the sum of the stamps contains all of them, and travels like a bucket
            self._stamps = packed_stamps(stamp, self._index, self._size, torch.uint8)
            self._send_up(self._stamps, SegmentPlace((), is_exact=True))
        self._send_up(bucket.buffer, SegmentPlace(bucket.parts, is_exact=bucket.is_exact))
        future: Future[Tensor] = Future()
        self._started.append((bucket.buffer, future))
        return future

    def _send_up(self, tensor: Tensor, place: SegmentPlace) -> None:
        if not tensor.numel():
            return
        for part in torch.split(tensor.view(-1), PIECE_BYTES // tensor.element_size()):
            piece = _Piece(part, place)
            place = place.after(part.numel())
            self._pieces.append(piece)
            self._pieces_up.put(piece)

    def finish(self) -> None:
        """Wait until all pieces are up, and bring the totals down."""
        pieces, self._pieces = self._pieces, []
        started, self._started = self._started, []
        if not started:
            return  # no round to end: the halves of shared memory must not change roles
        try:
            sums = [self._wait_up(piece) for piece in pieces]
            for piece, pending in zip(pieces, sums, strict=True):
                self._bring_down(piece, pending)
        finally:
            for level in self._levels:
                level.end_round()
            for tensor, future in started:
                future.set_result(tensor)

    def _wait_up(self, piece: _Piece) -> PendingSum | None:
        """Wait until a piece is up; bounded, since each wait of the thread is."""
        pending: PendingSum | None = piece.up.result()
        if pending is not None:
            pending.advance()
        return pending

    def stamps(self) -> Mapping[int, GradientStamp]:
        """The stamps of the workers in the round that has ended."""
        stamps, self._stamps = self._stamps, None
        return {} if stamps is None else unpacked_stamps(stamps)

    def close(self) -> None:
        """End the thread, and release connections, memory and process groups."""
        self._pieces_up.put(None)
        for level in self._levels:
            level.interrupt()
        self._thread.join(_END_S)
        for level in self._levels:
            level.close()
        self._levels.clear()
        for exchange in filter(None, (self._plain, self._coded)):
            exchange.close()
        self._pieces.clear()
        self._closed()

    def _bring_up(self) -> None:
        """The loop of the thread."""
        while (piece := self._pieces_up.get()) is not None:
            try:
                if self._failure is not None:
                    raise self._failure
                piece.up.set_result(self._carry(piece))
            except Exception as error:
                # the thread that waits for the piece raises it; the levels are out of step now
                self._failure = error
                piece.up.set_exception(error)
            # else this frame would keep the piece until the next one comes
            del piece

    def _carry(self, piece: _Piece) -> PendingSum | None:
        """Sum a piece through the levels in which this worker leads, then start to send it."""
        tensor = piece.tensor
        for level in self._levels:
            piece.sums.append(tensor)
            total = level.up(tensor)
            if total is None:
                return None
            tensor = total
        coded = self._coded if piece.place.parts else None
        return (coded or self._plain).start(tensor, piece.place)

    def _bring_down(self, piece: _Piece, pending: PendingSum | None) -> None:
        if pending is not None:
            pending.wait()
        for level, tensor in reversed(list(zip(self._levels, piece.sums, strict=True))):
            level.down(tensor)
