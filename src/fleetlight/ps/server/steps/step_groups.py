# SPDX-License-Identifier: Apache-2.0
"""`StepGroups`: the pushes of all workers that make one step together. Pure.

Pushes belong together by their order within a phase, the time between two barriers. The step
counters of workers differ once a worker has less data than another.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Generic, TypeVar

from fleetlight.errors import ProtocolError
from fleetlight.ps.changes import StepsState

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Complete(Generic[T]):
    """A step with the pushes of all its workers."""

    optimizer: int
    #: the largest of the workers' step counters
    step: int
    #: by worker, in ascending order
    contributions: dict[int, T]


@dataclasses.dataclass
class _Position:
    """The position of one worker and optimizer in a phase."""

    phase: int
    pushes: int
    step: int
    #: True if the last step was not applied, so that the worker may push it again
    again: bool = False


@dataclasses.dataclass
class _Group(Generic[T]):
    contributions: dict[int, T] = dataclasses.field(default_factory=dict)
    step: int = 0


class StepGroups(Generic[T]):
    """Groups pushes into steps and returns complete ones."""

    def __init__(self, worker_num: int, consecutive: bool = True) -> None:
        #: False if step counters may skip numbers
        self._consecutive = consecutive
        #: the last phase that each worker ended, without workers that have left
        self._ended = dict.fromkeys(range(worker_num), -1)
        self._positions: dict[tuple[int, int], _Position] = {}
        self._groups: dict[tuple[int, int, int], _Group[T]] = {}
        #: optimizer and worker of complete steps that are not applied yet
        self._complete: set[tuple[int, int]] = set()

    def add(
        self, optimizer: int, worker: int, phase: int, step: int, contribution: T
    ) -> Complete[T] | None:
        """Add a push; return its step if that is complete."""
        self._check_phase(worker, phase)
        position = self._positions.get((optimizer, worker))
        if position is None or position.phase < phase:
            position = _Position(phase, 0, step)
        else:
            self._check_step(optimizer, worker, position, phase, step)
        self._positions[optimizer, worker] = _Position(phase, position.pushes + 1, step)
        key = optimizer, phase, position.pushes
        group = self._groups.setdefault(key, _Group())
        group.contributions[worker] = contribution
        group.step = max(group.step, step)
        return self._take(key)

    def carried_out(self, complete: Complete[T]) -> None:
        """The step was applied or failed, and is no longer in progress."""
        self._complete -= {(complete.optimizer, worker) for worker in complete.contributions}

    def undone(self, optimizer: int, workers: Iterable[int]) -> None:
        """The step was not applied: its workers may push the same step counter again."""
        for worker in workers:
            self._positions[optimizer, worker].again = True

    def done(self, optimizer: int, workers: Iterable[int]) -> None:
        """The step was applied: its workers may not push it again."""
        for worker in workers:
            self._positions[optimizer, worker].again = False

    def passed(self, optimizer: int, worker: int, phase: int, step: int, again: bool) -> None:
        """Note a push of a replayed step; `again`: the step was not applied."""
        before = self._positions.get((optimizer, worker))
        pushes = before.pushes if before is not None and before.phase == phase else 0
        self._positions[optimizer, worker] = _Position(phase, pushes + 1, step, again)

    def state(self) -> StepsState:
        """The positions of all workers, without steps in progress."""
        in_progress = self._complete | {
            (optimizer, worker)
            for (optimizer, _, _), group in self._groups.items()
            for worker in group.contributions
        }
        return StepsState(
            dict(self._ended),
            [
                (
                    *key,
                    p.phase,
                    p.pushes - (key in in_progress),
                    p.step - (key in in_progress),
                    p.again,
                )
                for key, p in sorted(self._positions.items())
            ],
        )

    def restore(self, state: StepsState) -> None:
        """Restore what `state` returned."""
        self.clear()
        self._ended = dict(state.ended)
        for optimizer, worker, phase, pushes, step, again in state.positions:
            self._positions[optimizer, worker] = _Position(phase, pushes, step, again)

    def end(self, worker: int, phase: int) -> list[Complete[T]]:
        """End a worker's phase; return the steps that this completes."""
        if worker in self._ended:
            self._ended[worker] = max(self._ended[worker], phase)
        return self._completed()

    def leave(self, worker: int) -> list[Complete[T]]:
        """Remove a worker; return the steps that this completes."""
        self._ended.pop(worker, None)
        return self._completed()

    def enter(self, worker: int, phase: int) -> None:
        """Another worker takes the place, and pushes from this phase on."""
        self._ended[worker] = phase - 1
        for key in [key for key in self._positions if key[1] == worker]:
            del self._positions[key]

    def missing(self, optimizer: int, worker: int) -> list[int]:
        """The workers that the last push of a worker waits for."""
        return self.awaited_by(worker).get(optimizer, [])

    def awaited_by(self, worker: int) -> dict[int, list[int]]:
        """By optimizer: the workers that the pushes of a worker wait for."""
        return {
            optimizer: [w for w in self._expected(phase) if w not in group.contributions]
            for (optimizer, phase, _), group in self._groups.items()
            if worker in group.contributions
        }

    def begun(self, optimizer: int, worker: int) -> Complete[T] | None:
        """The pushes so far of the step to which a worker pushed last."""
        for (number, _, _), group in reversed(self._groups.items()):
            if number == optimizer and worker in group.contributions:
                return Complete(optimizer, group.step, dict(sorted(group.contributions.items())))
        return None

    def clear(self) -> None:
        """Forget every step."""
        self._positions.clear()
        self._groups.clear()
        self._complete.clear()

    def _expected(self, phase: int) -> list[int]:
        return [worker for worker, ended in self._ended.items() if ended < phase]

    def _completed(self) -> list[Complete[T]]:
        taken = [self._take(key) for key in sorted(self._groups)]
        return [complete for complete in taken if complete is not None]

    def _take(self, key: tuple[int, int, int]) -> Complete[T] | None:
        group = self._groups[key]
        if any(worker not in group.contributions for worker in self._expected(key[1])):
            return None
        del self._groups[key]
        self._complete |= {(key[0], worker) for worker in group.contributions}
        return Complete(key[0], group.step, dict(sorted(group.contributions.items())))

    def _check_phase(self, worker: int, phase: int) -> None:
        ended = self._ended.get(worker)
        if ended is None:
            raise ProtocolError(f"worker {worker} pushed a step after it had left")
        if phase <= ended:
            raise ProtocolError(
                f"worker {worker} pushed a step of phase {phase}, but it ended phase {ended}; "
                "after a barrier the next phase begins"
            )

    def _check_step(
        self, optimizer: int, worker: int, position: _Position, phase: int, step: int
    ) -> None:
        if phase < position.phase:
            raise ProtocolError(
                f"worker {worker} pushed a step of phase {phase} after one of {position.phase}"
            )
        allowed = {position.step + 1} | ({position.step} if position.again else set())
        if self._consecutive and step not in allowed:
            raise ProtocolError(
                f"worker {worker} pushed step {step} of optimizer {optimizer} after step "
                f"{position.step}, expected step {position.step + 1}; every step is pushed once "
                "and in order"
            )
