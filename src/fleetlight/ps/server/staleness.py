# SPDX-License-Identifier: Apache-2.0
"""How far workers are apart, and how old the values were that a gradient was made with. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping


class Clocks:
    """Steps of each worker that are applied, counted from the last barrier on.

    A worker that has ended a phase or left holds nobody up: it makes no more step. One that makes
    another step in a phase it had ended, since there was more to do after all, goes on in it.
    """

    def __init__(self, worker_num: int) -> None:
        #: the phase in which a worker pushed last, and its steps in that phase
        self._applied = dict.fromkeys(range(worker_num), (0, 0))
        #: the last phase each worker has ended; a worker that has left is not in it
        self._ended = dict.fromkeys(range(worker_num), -1)

    def advance(self, worker: int, phase: int, steps: int = 1) -> None:
        """So many more steps of the worker are applied."""
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

    def slowest(self, phase: int) -> int:
        """The fewest steps of any worker that goes on; of all when none does."""
        going_on = self._going_on(phase) or list(self._applied)
        return min(self._steps(worker, phase) for worker in going_on)

    def may(self, phase: int, at_least: int) -> bool:
        """True when every worker that goes on has had so many steps applied."""
        return not self.behind(phase, at_least)

    def behind(self, phase: int, at_least: int) -> list[int]:
        """Who goes on and has had fewer steps applied."""
        return [w for w in self._going_on(phase) if self._steps(w, phase) < at_least]

    def state(self) -> tuple[dict[int, tuple[int, int]], dict[int, int]]:
        """What was applied of each worker, and what each has ended."""
        return dict(self._applied), dict(self._ended)

    def restore(self, applied: Mapping[int, tuple[int, int]], ended: Mapping[int, int]) -> None:
        """The way back of `state`."""
        self._applied, self._ended = dict(applied), dict(ended)

    def _going_on(self, phase: int) -> list[int]:
        return [worker for worker, ended in self._ended.items() if ended < phase]

    def _steps(self, worker: int, phase: int) -> int:
        of, steps = self._applied[worker]
        return steps if of == phase else 0


class Versions:
    """Counts what is applied to a server's values, and how late each push came."""

    def __init__(self) -> None:
        self.version = 0
        #: staleness -> how many pushes had it
        self.staleness: Counter[int] = Counter()

    def applied(self, seen: Iterable[int]) -> None:
        """One change of the values, made of pushes whose workers had seen these versions.

        The staleness of a push is the number of changes since; those of its own worker count.
        """
        for version in seen:
            self.staleness[max(0, self.version - version)] += 1
        self.version += 1

    def restore(self, version: int, staleness: Mapping[int, int]) -> None:
        """Go on from there."""
        self.version, self.staleness = version, Counter(staleness)
