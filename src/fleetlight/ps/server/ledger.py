# SPDX-License-Identifier: Apache-2.0
"""`Ledger`: what is part of a server's values by now. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from fleetlight.ps.changes import LedgerState, WorkerPart
from fleetlight.ps.high_water_marks import HighWaterMarks
from fleetlight.ps.messages.base import NO_SIGNAL, ControlSignal
from fleetlight.ps.server.staleness import Clocks, Versions


@dataclasses.dataclass(frozen=True)
class Peer:
    """Who speaks over a connection."""

    worker: int
    incarnation: int
    lane: str
    life: int = 1

    def __str__(self) -> str:
        return f"worker {self.worker}"


class Ledger:
    """How far the workers are, how old their gradients were, which pushes came."""

    def __init__(self, worker_num: int) -> None:
        self._worker_num = worker_num
        self.clocks = Clocks(worker_num)
        self.versions = Versions()
        self.marks = HighWaterMarks()
        #: the workers whose last push changed nothing
        self.skipped: set[int] = set()
        #: what all have been told to do behind their steps: calls add up
        self.call = NO_SIGNAL

    def book(
        self, entries: Sequence[WorkerPart], applied: bool, call: ControlSignal = NO_SIGNAL
    ) -> None:
        """A change was made, or skipped: then the workers are further, the values are the same."""
        self.call |= call
        if applied:
            self.versions.applied(e.seen for e in entries if e.seen is not None)
        workers = {entry.worker for entry in entries}
        self.skipped = self.skipped - workers if applied else self.skipped | workers
        for entry in entries:
            self.clocks.advance(entry.worker, entry.phase, entry.merged)
            self.marks.applied(entry.worker, entry.incarnation, entry.sequence)

    def forget_workers(self) -> None:
        """Others come, and begin at their first step."""
        self.clocks = Clocks(self._worker_num)
        self.marks.restore(self.marks.epoch, [])
        self.versions.restore(self.versions.version, {})
        self.skipped.clear()
        self.call = NO_SIGNAL

    def state(self) -> LedgerState:
        """All of it, to be kept with the values."""
        applied, ended = self.clocks.state()
        return LedgerState(
            epoch=self.marks.epoch,
            marks=self.marks.marks(),
            applied=applied,
            ended=ended,
            version=self.versions.version,
            staleness=dict(self.versions.staleness),
            skipped=sorted(self.skipped),
            call=self.call,
        )

    def restore(self, state: LedgerState) -> None:
        """The way back of `state`."""
        self.clocks.restore(state.applied, state.ended)
        self.versions.restore(state.version, state.staleness)
        self.marks.restore(state.epoch, state.marks)
        self.skipped = set(state.skipped)
        self.call = state.call
