# SPDX-License-Identifier: Apache-2.0
"""`Admissions`: workers join a running job at the start of a turn. Pure.

A worker waits for the start of a turn over its loader. The turn is held there: no worker gets a
range of it until worker 0 has sent its state, and those that wait have taken it and are known to
all servers. So all workers of a step, of a barrier and of a phase agree who takes part.
"""

from __future__ import annotations

from collections.abc import Iterable

#: how long a turn is held for the state of worker 0, and for those that take it
HOLD_S = 30.0

#: a loader and the number of a turn over it
Turn = tuple[int, int]


class Admissions:
    """The workers that wait, and those that enter."""

    def __init__(self) -> None:
        #: by worker that waits: its loader
        self._waiting: dict[int, int] = {}
        #: workers that take part, but are not known to all servers
        self._entering: set[int] = set()
        #: the turn at which worker 0 has sent its state
        self._offered: Turn | None = None
        #: the turn that is held, and since when
        self._held: Turn | None = None
        self._since = 0.0
        #: the turn that starts without those that wait
        self._skipped: Turn | None = None

    @property
    def entering(self) -> list[int]:
        """The workers that take part, but are not known to all servers."""
        return sorted(self._entering)

    def restore(self, entering: Iterable[int]) -> None:
        """Restore the workers that `entering` returned."""
        self._entering = set(entering)

    def wait(self, worker: int, loader: int) -> Turn | None:
        """A worker waits to join; returns the turn whose state it may take."""
        self._waiting[worker] = loader
        return self._offered if self._offered is not None and self._offered[0] == loader else None

    def forget(self, worker: int) -> None:
        """The worker has left or was lost."""
        self._waiting.pop(worker, None)
        self._entering.discard(worker)

    def hold(self, turn: Turn, now: float) -> bool:
        """Hold a turn that has not begun; False: workers may get ranges of it."""
        if self._entering:
            return True
        if turn == self._skipped or turn[0] not in self._waiting.values():
            return False
        if self._held != turn:
            self._held, self._since = turn, now
        if now - self._since > HOLD_S:
            self.skip(turn)
            return False
        return True

    def wants_state(self, turn: Turn) -> bool:
        """True if worker 0 is to send its state at this turn."""
        return self._offered != turn

    def offer(self, turn: Turn) -> None:
        """Worker 0 has sent its state at the start of this turn."""
        self._offered = turn

    def skip(self, turn: Turn) -> None:
        """Let this turn start without those that wait."""
        self._skipped = turn

    def may_cut(self, turn: Turn) -> bool:
        """False for a turn that started without those that wait."""
        return turn != self._skipped

    def begin(self, turn: Turn) -> None:
        """A worker gets the first range of this turn: no worker joins there any more."""
        if self._offered == turn:
            self._offered = None

    def enter(self, worker: int, turn: Turn) -> bool:
        """The worker has the state of this turn, and takes part; False: it must wait again."""
        if worker in self._entering:
            return True
        if self._offered != turn or worker not in self._waiting:
            return False
        del self._waiting[worker]
        self._entering.add(worker)
        return True

    def entered(self, worker: int) -> None:
        """All servers know the worker."""
        self._entering.discard(worker)
