# SPDX-License-Identifier: Apache-2.0
"""`TrainingProgress`: the steps and pushes that a server's values contain. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from fleetlight.ps.changes import LedgerState, WorkerPart
from fleetlight.ps.high_water_marks import HighWaterMarks
from fleetlight.wire.control_signals import NO_SIGNAL, ControlSignal


class TrainingProgress:
    """The steps of each worker, the staleness of gradients, and the last applied pushes."""

    def __init__(self, worker_num: int) -> None:
        self._worker_num = worker_num
        self.clocks = Clocks(worker_num)
        self.versions = Versions()
        self.marks = HighWaterMarks()
        #: the workers whose last push changed nothing
        self.skipped: set[int] = set()
        #: control signals that workers received with their steps; they add up
        self.call = NO_SIGNAL

    def book(
        self, entries: Sequence[WorkerPart], applied: bool, call: ControlSignal = NO_SIGNAL
    ) -> None:
        """Count a change that was applied or skipped; both advance the workers."""
        self.call |= call
        if applied:
            self.versions.applied(e.seen for e in entries if e.seen is not None)
        workers = {entry.worker for entry in entries}
        self.skipped = self.skipped - workers if applied else self.skipped | workers
        for entry in entries:
            self.clocks.advance(entry.worker, entry.phase, entry.merged)
            self.marks.applied(entry.worker, entry.started_at, entry.sequence)

    def forget_workers(self) -> None:
        """Forget the workers; other workers start at their first step."""
        self.clocks = Clocks(self._worker_num)
        self.marks.restore(self.marks.epoch, [])
        self.versions.restore(self.versions.version, {})
        self.skipped.clear()
        self.call = NO_SIGNAL

    def state(self) -> LedgerState:
        """All counts, in the form of the log."""
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
        """Restore the counts of `state`."""
        self.clocks.restore(state.applied, state.ended)
        self.versions.restore(state.version, state.staleness)
        self.marks.restore(state.epoch, state.marks)
        self.skipped = set(state.skipped)
        self.call = state.call


class Clocks:
    """The applied steps of each worker since the last barrier.

    A worker that ended the phase or left delays no other worker. A worker that pushes again in a
    phase that it ended resumes the phase.
    """

    def __init__(self, worker_num: int) -> None:
        #: the phase in which a worker pushed last, and its steps in that phase
        self._applied = dict.fromkeys(range(worker_num), (0, 0))
        #: the last phase that each worker ended, without workers that have left
        self._ended = dict.fromkeys(range(worker_num), -1)

    def advance(self, worker: int, phase: int, steps: int = 1) -> None:
        """Count applied steps of a worker."""
        self._applied[worker] = phase, self._steps(worker, phase) + steps
        if self._ended.get(worker, -1) >= phase:
            self._ended[worker] = phase - 1

    def end(self, worker: int, phase: int) -> None:
        """The worker makes no more step in this phase."""
        if worker in self._ended:
            self._ended[worker] = max(self._ended[worker], phase)

    def leave(self, worker: int) -> None:
        """The worker makes no more step at all."""
        self._ended.pop(worker, None)

    def enter(self, worker: int, phase: int) -> None:
        """Another worker takes the place, and makes steps from this phase on."""
        self._applied[worker] = phase, 0
        self._ended[worker] = phase - 1

    def slowest(self, phase: int) -> int:
        """The fewest steps of any active worker; of all workers when none is active."""
        active = self._active(phase) or list(self._applied)
        return min(self._steps(worker, phase) for worker in active)

    def all_have(self, phase: int, at_least: int) -> bool:
        """True if every active worker has at least this many applied steps."""
        return not self.behind(phase, at_least)

    def behind(self, phase: int, at_least: int) -> list[int]:
        """Active workers with fewer applied steps."""
        return [w for w in self._active(phase) if self._steps(w, phase) < at_least]

    def state(self) -> tuple[dict[int, tuple[int, int]], dict[int, int]]:
        """The applied steps and the last ended phase of each worker."""
        return dict(self._applied), dict(self._ended)

    def restore(self, applied: Mapping[int, tuple[int, int]], ended: Mapping[int, int]) -> None:
        """Restore the counts of `state`."""
        self._applied, self._ended = dict(applied), dict(ended)

    def _active(self, phase: int) -> list[int]:
        return [worker for worker, ended in self._ended.items() if ended < phase]

    def _steps(self, worker: int, phase: int) -> int:
        of, steps = self._applied[worker]
        return steps if of == phase else 0


class Versions:
    """Counts the changes of a server's values, and the staleness of pushes."""

    def __init__(self) -> None:
        self.version = 0
        #: staleness -> how many pushes had it
        self.staleness: Counter[int] = Counter()

    def applied(self, seen: Iterable[int]) -> None:
        """Count one change, made from pushes whose workers read the versions in `seen`.

        The staleness of a push is the number of changes since then, its own worker's included.
        """
        for version in seen:
            self.staleness[max(0, self.version - version)] += 1
        self.version += 1

    def restore(self, version: int, staleness: Mapping[int, int]) -> None:
        """Restore both counts."""
        self.version, self.staleness = version, Counter(staleness)
