# SPDX-License-Identifier: Apache-2.0
"""`BatchLoop`: the way of a batch from torch's iterator to the script's loop."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from fleetlight.data.cursor import LoaderCursor
from fleetlight.data.observer import BatchShare, LoaderObserver
from fleetlight.data.read_ahead import ReadAhead
from fleetlight.data.sources.source import RecordSource
from fleetlight.errors import PeerError

#: makes torch's iterator over the batches
Load = Callable[[], Iterator[Any]]


class _Loaded(NamedTuple):
    """A batch, how many of its samples count here and in all, and the position after it."""

    batch: Any
    mine: int
    total: int
    position: dict[str, Any]


class BatchLoop:
    """Loads batches, counts them, reports them to the observer and hands them out."""

    def __init__(
        self, source: RecordSource, cursor: LoaderCursor, observer: LoaderObserver
    ) -> None:
        self._source, self._cursor, self._observer = source, cursor, observer
        #: of the batch handed out last
        self.share: BatchShare | None = None

    def run(self, load: Load) -> Iterator[Any]:
        """The rest of an epoch, as one loop of the script."""
        cursor, source = self._cursor, self._source
        cursor.start_loop()
        self._observer.start_iteration()
        may_be_over = source.may_resume_at_end and any(cursor.position.values())
        # a loop inside another one, such as a validation, gives the outer batch its weight back
        outer = self._observer.set_share(None)
        try:
            is_empty = True
            for batch in self._iterate(load):
                is_empty = False
                yield batch
            while source.has_more():
                yield from self._iterate(load)
            if is_empty and may_be_over:
                # saved after the last batch of a stream, whose length is unknown
                cursor.enter(cursor.epoch + 1)
                yield from self._iterate(load)
        finally:
            self._observer.set_share(outer)
        cursor.enter(cursor.epoch + 1)

    def _iterate(self, load: Load) -> Iterator[Any]:
        """All batches of one iterator of torch."""
        cursor, source = self._cursor, self._source
        with cursor.iteration() as me:
            self._observer.between_batches()
            source.begin(cursor.epoch, cursor.seed)
            cursor.rewind()
            for number, loaded in enumerate(self._looking_ahead(self._counted(load))):
                if number and not source.knows_its_end:
                    # only now it is known that the epoch has another batch
                    self._observer.between_batches()
                self._hand_out(loaded)
                try:
                    yield loaded.batch
                except GeneratorExit:
                    if cursor.is_current(me):
                        # the next call of a worker that needs its peers raises the error
                        with contextlib.suppress(PeerError):
                            source.give_back()
                    raise
                cursor.check_current(me)
                # after the last batch the epoch is not over: the script may have work to do
                if source.knows_its_end and not source.is_at_end(cursor.position):
                    self._observer.between_batches()

    def _hand_out(self, loaded: _Loaded) -> None:
        """Move past a batch and report what it counts."""
        cursor = self._cursor
        cursor.position = self._source.before(cursor.position, loaded.position, loaded.total)
        self._observer.before_batch(cursor.state())
        self._source.handed_out(cursor.position, loaded.position)
        cursor.advance(loaded.position)
        self.share = BatchShare(loaded.mine, loaded.total, cursor.epoch, cursor.consumed)
        self._observer.set_share(self.share)

    def _counted(self, load: Load) -> Iterator[_Loaded]:
        for dealt in self._source.counted(self._opened(load)):
            yield _Loaded(*dealt, self._source.position)

    def _opened(self, load: Load) -> Iterator[Any]:
        """torch's iterator; within an epoch it must not draw its start's random number again."""
        if not self._cursor.consumed:
            return load()
        before = torch.get_rng_state()
        try:
            return load()
        finally:
            torch.set_rng_state(before)

    def _looking_ahead(self, loaded: Iterator[_Loaded]) -> Iterator[_Loaded]:
        """All of them; the observer may want batches loaded before the one handed out."""
        ahead = self._observer.batches_ahead()
        if not ahead:
            yield from loaded
            return
        early = ReadAhead(loaded)
        while early.peek(1):
            self._observer.announce([one.batch for one in early.peek(1 + ahead)])
            yield next(early)
        # an error of the batch after those loaded
        yield from early
