# SPDX-License-Identifier: Apache-2.0
"""`Oracle`: the promises that hold in every schedule. Each has a name."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tests.chaos.simulation.script import SYNC, Script, Update
from tests.chaos.simulation.world import Violation

Array = NDArray[Any]
_NEAR = 1e-3

PROMISES = {
    "once": "an update that was acknowledged is part of its rows once, and stays",
    "sent": "nothing is part of a row that was not sent, or more often than once",
    "step": "in sync mode the k-th updates of all workers in a phase make one step, and no other",
    "skip": "a worker is told truly whether its update was applied or skipped",
    "stale": "no worker reads values that lack more steps of a slower one than staleness allows",
    "meeting": "all workers of a barrier get the same reply: what each of them sent",
    "fence": "once a later incarnation of a worker is known, nothing of an earlier one is applied",
    "away": "a running, connected worker is not counted as away",
    "waiting": "no thread waits forever",
    "cause": "no worker gets an error unless one has happened",
    "foreseen": "a server raises only errors of the package",
    "left": "a job that has ended well leaves nothing on the disks",
    "record": "each record of an epoch is trained once, and again only after its worker died",
    "lease": "no worker trains a record that another one has reported as finished",
    "member": "a barrier has the workers that take part, and no other",
    "barrier": "all workers count the barriers alike",
    "phase": "all workers train in the same phase of a turn",
    "place": "no worker takes the place of one that takes part",
    "gang": "a launcher ends all that it started, and says why",
    "index": "every member has its own index",
    "moved": "a worker that knows a process of a server is not told an older one",
    "number": "two processes of a server have different incarnations, as far as a worker knows",
    "one": "in the end, one process of each server runs",
    "found": "in the end, every worker knows where each server listens",
}


def broken(promise: str, text: str) -> Violation:
    """The violation of a promise."""
    return Violation(f"{promise!r}, {PROMISES[promise]}: {text}")


class Oracle:
    """Knows which updates were sent, acknowledged and read."""

    def __init__(self, script: Script) -> None:
        self.script = script
        width = len(script.everything)
        self.updates = script.everything
        #: how much an update adds to its rows
        self.weights = np.zeros(width)
        #: by server: the most that a row may have now
        self._may = [np.zeros(width) for _ in range(script.servers)]
        #: by id: the updates that have it
        self._touches: dict[int, Array] = {}
        #: by id: the least that its row must have from now on
        self._floors: dict[int, Array] = {}
        self._sent: list[set[int]] = [set() for _ in range(script.servers)]
        #: by server and worker: the latest incarnation of which an update was acknowledged
        self._known: dict[tuple[int, int], int] = {}
        for update in self.updates:
            group = script.group(update)
            self.weights[update.column] = 0 if script.is_skipped(update) else 1 / len(group)
            for one in (one for ids in update.ids for one in ids):
                self._touches.setdefault(one, np.zeros(width))[update.column] = 1

    def sends(self, server: int, update: Update) -> None:
        """A worker is about to send an update."""
        self._sent[server].add(update.column)
        group = self.script.group(update)
        if all(one.column in self._sent[server] for one in group):
            for one in group:
                self._may[server][one.column] = self.weights[one.column]

    def acknowledged(self, server: int, update: Update, applied: bool) -> None:
        """A worker got the acknowledgement of an update."""
        if applied == self.script.is_skipped(update):
            raise broken("skip", f"server {server} told worker {update.worker} {applied}: {update}")
        key = server, update.worker
        self._known[key] = max(self._known.get(key, 0), update.incarnation)
        for one in self.script.group(update):
            for row in one.ids[server]:
                self._floor(row)[one.column] = self.weights[one.column]

    def floors(self, ids: Sequence[int]) -> Array:
        """The least that these rows must have when they are read."""
        return np.array([self._floor(one) for one in ids])

    def read(self, server: int, ids: Sequence[int], rows: Array, floors: Array, who: str) -> None:
        """Rows were read; `floors` were taken before the request."""
        may = self._may[server]
        for one, row, floor in zip(ids, rows, floors, strict=True):
            if (row < floor - _NEAR).any():
                raise broken("once", f"{who} read row {one}: {self._comparison(row, floor)}")
            most = may * self._touches.get(one, 0)
            is_whole = (row < _NEAR) | (row > self.weights - _NEAR)
            if (row > most + _NEAR).any() or not is_whole.all():
                raise broken("sent", f"{who} read row {one}: {self._comparison(row, most)}")
            self._floors[one] = np.maximum(self._floor(one), row)

    def made(self, server: int, columns: set[int]) -> None:
        """A server makes a step of these updates."""
        for column in columns:
            update = self.updates[column]
            known = self._known.get((server, update.worker), 0)
            if update.incarnation < known:
                raise broken(
                    "fence", f"server {server} knows incarnation {known}, applied {update}"
                )
        if self.script.mode == SYNC and not self.script.doubles_worker:
            group = self.script.group(self.updates[min(columns)])
            expected = {one.column for one in group if one.ids[server]}
            if columns != expected:
                raise broken("step", f"server {server} made {columns}, expected {expected}")

    def waited(self, server: int, rows: Any, phase: int, at_least: int, worker: int) -> None:
        """A server lets a worker read that requires so many steps of all workers."""
        for other, phases in enumerate(self.script.updates):
            mine = phases[phase]
            for update in mine[:at_least]:
                if update.column not in self._sent[server] or not self._is_in(rows, server, update):
                    raise broken(
                        "stale",
                        f"server {server} let worker {worker} read after {at_least} steps of "
                        f"all workers in phase {phase}, but misses {update} of worker {other}",
                    )

    def _is_in(self, rows: Any, server: int, update: Update) -> bool:
        weight = self.weights[update.column]
        one = update.ids[server][0]
        return not weight or bool(rows.read(np.array([one]))[0][update.column] > _NEAR)

    def _floor(self, one: int) -> Array:
        if one not in self._floors:
            self._floors[one] = np.zeros(len(self.weights))
        return self._floors[one]

    def _comparison(self, row: Array, expected: Array) -> str:
        columns = np.flatnonzero(np.abs(row - expected) > _NEAR)
        return "; ".join(
            f"{row[c]:g} times {self.updates[c]}, expected {expected[c]:g}" for c in columns
        )
