# SPDX-License-Identifier: Apache-2.0
"""The route by levels: sums inside the hosts first, so that only leaders send across.

Those who send sum by an exchange, which may encode what it sends. Without levels, all workers do.

A thread of its own brings tensors up, in pieces and in the order in which they are started: while
a piece is on the network, the host sums the next one and backward goes on. `finish` brings the
totals down again, on the thread that waits for them. So each connection has one user at a time:
nothing comes down before all that was started is up.
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

#: so much goes up at a time; smaller pieces overlap more, larger ones have fewer waits
PIECE_BYTES = 4 << 20
#: how long the thread may take to end when its waits have been interrupted
_END_S = 5.0


class Level(Protocol):
    """This worker's group at one level."""

    def up(self, tensor: Tensor) -> Tensor | None:
        """Add a flat tensor to those of the group; the leader gets the sum, the others None."""

    def down(self, tensor: Tensor) -> None:
        """Take the total of what came up first and is not yet down.

        The leader's sum, where `up` has put it, holds the total by then.
        """

    def end_round(self) -> None:
        """All that went up has come down."""

    def interrupt(self) -> None:
        """End the waits of another thread, as far as that is possible."""

    def close(self) -> None:
        """Let go of what was opened for it."""


class GroupLevel:
    """A group with a process group, where there is no memory to share."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def up(self, tensor: Tensor) -> Tensor | None:
        """As in `Level`; the first of the process group leads."""
        self._group.reduce(tensor, 0).wait()
        return tensor if self._group.rank() == 0 else None

    def down(self, tensor: Tensor) -> None:
        """As in `Level`."""
        self._group.broadcast(tensor, 0).wait()

    def end_round(self) -> None:
        """Nothing is kept."""

    def interrupt(self) -> None:
        """The process group's own deadline ends its waits."""

    def close(self) -> None:
        """The process group is the group's."""


@dataclasses.dataclass
class _Piece:
    """A part of a tensor, on its way."""

    tensor: Tensor
    #: where it lies in its bucket
    place: SegmentPlace
    #: what this worker had at each of its levels
    sums: list[Tensor] = dataclasses.field(default_factory=list)
    #: done when it is up; its result is on its way among the leaders, where this worker is one
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
        """`levels` are this worker's, from below. Where it leads in all, it goes on by an exchange.

        By `coded`, if a bucket says whose its values are. The process groups are the route's own
        until it has `closed`: others would change the order in which they are used.
        """
        self._index, self._size = index, size
        self._levels = list(levels)
        self._plain, self._coded = plain, coded
        self._closed = closed
        self._pieces: list[_Piece] = []
        self._started: list[tuple[Tensor, Future[Tensor]]] = []
        self._stamps: Tensor | None = None
        self._failure: Exception | None = None
        self._way_up: queue.SimpleQueue[_Piece | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._bring_up, name="fleet-hierarchy", daemon=True)
        self._thread.start()

    def start(self, bucket: Bucket, stamp: GradientStamp) -> Future[Tensor]:
        """Send a bucket on its way up; its future is done by `finish`."""
        if not self._started:
            # the sum of the stamps has all of them, and takes the way of the others
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
            place = place.behind(part.numel())
            self._pieces.append(piece)
            self._way_up.put(piece)

    def finish(self) -> None:
        """Wait until all is up, and bring it down."""
        pieces, self._pieces = self._pieces, []
        started, self._started = self._started, []
        if not started:
            return  # no round to end: memory whose halves take turns would not
        try:
            shots = [self._gone_up(piece) for piece in pieces]
            for piece, shot in zip(pieces, shots, strict=True):
                self._bring_down(piece, shot)
        finally:
            for level in self._levels:
                level.end_round()
            for tensor, future in started:
                future.set_result(tensor)

    def _gone_up(self, piece: _Piece) -> PendingSum | None:
        """Wait until a piece is up; the waits of the thread are bounded, so this is."""
        shot: PendingSum | None = piece.up.result()
        if shot is not None:
            shot.go_on()
        return shot

    def stamps(self) -> Mapping[int, GradientStamp]:
        """What the workers told of themselves in the round that has ended."""
        stamps, self._stamps = self._stamps, None
        return {} if stamps is None else unpacked_stamps(stamps)

    def close(self) -> None:
        """End the thread and let go of connections, memory and process groups."""
        self._way_up.put(None)
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
        """What the thread does."""
        while (piece := self._way_up.get()) is not None:
            try:
                if self._failure is not None:
                    raise self._failure
                piece.up.set_result(self._carry(piece))
            except Exception as error:
                # whoever waits for the piece raises it; the levels are no longer in step
                self._failure = error
                piece.up.set_exception(error)
            # not to be kept until the next one comes
            del piece

    def _carry(self, piece: _Piece) -> PendingSum | None:
        """Through the levels, as far as this worker leads, and then on to the network."""
        tensor = piece.tensor
        for level in self._levels:
            piece.sums.append(tensor)
            total = level.up(tensor)
            if total is None:
                return None
            tensor = total
        coded = self._coded if piece.place.parts else None
        return (coded or self._plain).start(tensor, piece.place)

    def _bring_down(self, piece: _Piece, shot: PendingSum | None) -> None:
        if shot is not None:
            shot.wait()
        for level, tensor in reversed(list(zip(self._levels, piece.sums, strict=True))):
            level.down(tensor)
