# SPDX-License-Identifier: Apache-2.0
"""`Ledger`: what is part of a server's values by now. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from fleetlight.ps.sequences import HighWater
from fleetlight.ps.server.staleness import Clocks, Versions


@dataclasses.dataclass(frozen=True)
class Peer:
    """Who speaks over a connection."""

    worker: int
    incarnation: int
    lane: str

    def __str__(self) -> str:
        return f"worker {self.worker}"


@dataclasses.dataclass(frozen=True)
class Entry:
    """A worker's part of a change."""

    peer: Peer
    sequence: int
    phase: int = 0
    #: steps that were merged into it
    steps: int = 1
    #: the version that its gradients were made with; None where that has no meaning
    seen: int | None = None


class Ledger:
    """How far the workers are, how old their gradients were, which pushes came."""

    def __init__(self, worker_num: int) -> None:
        self.clocks = Clocks(worker_num)
        self.versions = Versions()
        self.marks = HighWater()

    def book(self, entries: Sequence[Entry], applied: bool) -> None:
        """A change was made, or skipped: then the workers are further, the values are the same."""
        if applied:
            seen = [(e.peer.worker, e.seen) for e in entries if e.seen is not None]
            self.versions.applied(seen)
        for entry in entries:
            peer = entry.peer
            self.clocks.advance(peer.worker, entry.phase, entry.steps)
            self.marks.applied(peer.worker, peer.incarnation, entry.sequence)
