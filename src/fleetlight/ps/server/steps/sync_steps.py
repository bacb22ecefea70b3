# SPDX-License-Identifier: Apache-2.0
"""`SyncStepCoordinator`: in sync mode, the pushes of all workers make one step.

The thread of the last worker applies the step, and the other threads wait for it. A server may hold
the summed gradients until every worker has sent the factor to apply.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import msgspec
from numpy.typing import NDArray

from fleetlight.errors import GradientError, PlanError, ProtocolError
from fleetlight.ps.changes import HeldStepApplied, StepApplied, StepHeld, StepsState, WorkerPart
from fleetlight.ps.gradients import Gradients, described, mean, scaled
from fleetlight.ps.messages import Apply, Push
from fleetlight.ps.server.shared_exclusive_lock import SharedExclusiveLock
from fleetlight.ps.server.steps.progress import TrainingProgress
from fleetlight.ps.server.steps.step_groups import Complete, StepGroups
from fleetlight.ps.server.workers.presence import PresenceMonitor, copied_for_thread
from fleetlight.ps.server.workers.roster import Peer
from fleetlight.ps.server.write_ahead_log import WriteAheadLog
from fleetlight.ps.tables.server_state import ServerState
from fleetlight.ps.update import Ids
from fleetlight.wire.control_signals import NO_SIGNAL, ControlSignal

Array = NDArray[Any]
P = TypeVar("P")


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The result of a step."""

    #: False if the step was skipped
    applied: bool
    #: by table: the ids whose rows may have changed
    touched: dict[int, Ids] = dataclasses.field(default_factory=dict)
    #: by table that the worker asks for: those of them that are not in its own push
    by_others: dict[int, Ids] = dataclasses.field(default_factory=dict)
    square: float = 0.0
    #: the control signal for all workers of the step
    call: ControlSignal = NO_SIGNAL


@dataclasses.dataclass
class _Part:
    """The push of one worker to a step, and its outcome."""

    peer: Peer
    message: Push
    gradients: Gradients
    #: why the gradients must not be applied
    refusal: GradientError | None
    outcome: Outcome | Exception | None = None


@dataclasses.dataclass
class _Release:
    """The request of one worker to apply or skip a held step."""

    peer: Peer
    message: Apply
    outcome: Outcome | Exception | None = None


@dataclasses.dataclass
class _HeldStep:
    change: StepHeld
    #: None when the step will be skipped
    gradients: Gradients | None

    @property
    def refusal(self) -> GradientError | None:
        """Why the gradients must not be applied; a loss scaler may still skip the step."""
        return GradientError(self.change.refusal) if self.change.refusal else None

    def entry(self, worker: int) -> WorkerPart | None:
        """The part of a worker in this step; None if it has none."""
        return next((entry for entry in self.change.entries if entry.worker == worker), None)


class SyncStepCoordinator:
    """The steps in progress. `presence.changed` guards its state."""

    def __init__(
        self,
        state: ServerState,
        presence: PresenceMonitor,
        values_lock: SharedExclusiveLock,
        progress: TrainingProgress,
        log: WriteAheadLog,
        worker_num: int,
    ) -> None:
        self._log = log
        self._state = state
        self._presence = presence
        self._changed = presence.changed
        self._has_outcome = presence.condition()
        self._worker_num = worker_num
        self._values_lock = values_lock
        self._progress = progress
        self._steps: StepGroups[_Part] = StepGroups(worker_num)
        # not every step is held
        self._releases: StepGroups[_Release] = StepGroups(worker_num, consecutive=False)
        self._held: dict[int, _HeldStep] = {}
        #: True if the values come from a snapshot, without the steps after it
        self._has_lost = False

    def push(
        self, peer: Peer, message: Push, gradients: Gradients, refusal: GradientError | None
    ) -> Outcome:
        """A worker's part of a step; returns when the step is applied, skipped or held."""
        part = _Part(peer, message, gradients, refusal)
        with self._changed:
            if (held := self.held(peer, message)) is not None:
                # the server restarted after this push
                return held
            complete = self._steps.add(
                message.optimizer, peer.worker, message.phase, message.step, part
            )
            if complete is None:
                self._refuse_uneven(message.optimizer, peer.worker)
        if complete is not None:
            self._carry_out(complete)
        return self._outcome(part, self._steps.missing)

    def held(self, peer: Peer, message: Push | Apply) -> Outcome | None:
        """The outcome of a push whose gradients are held, or None; called with `changed` held."""
        kept = self._held.get(message.optimizer)
        if kept is None or not _is_of(kept.entry(peer.worker), peer, message.sequence):
            return None
        return Outcome(not kept.change.skipped, square=kept.change.square)

    def apply(self, peer: Peer, message: Apply) -> Outcome:
        """Apply or skip a held step; return when all workers have sent their requests."""
        release = _Release(peer, message)
        with self._changed:
            kept = self._held.get(message.optimizer)
            if kept is None or kept.entry(peer.worker) is None:
                if self._has_lost:
                    return self._apply_nothing(peer, message)
                raise ProtocolError(
                    f"{peer} applies gradients of optimizer {message.optimizer}, but none are held"
                )
            complete = self._releases.add(
                message.optimizer, peer.worker, message.phase, message.step, release
            )
        if complete is not None:
            self._carry_out_held(complete)
        return self._outcome(release, self._releases.missing)

    def _apply_nothing(self, peer: Peer, message: Apply) -> Outcome:
        """Count lost gradients of an earlier incarnation as applied; called with `changed` held."""
        entry = WorkerPart(peer.worker, peer.started_at, message.sequence, message.phase)
        self._progress.book([entry], not message.skip)
        return Outcome(applied=not message.skip)

    def end(self, worker: int, phase: int) -> Callable[[], None]:
        """The worker makes no more step in this phase; this may complete steps of others.

        Called with `changed` held; the caller runs the returned function without it.
        """
        steps, releases = self._steps.end(worker, phase), self._releases.end(worker, phase)
        return lambda: self._carry_out_all(steps, releases)

    def leave(self, worker: int) -> None:
        """The worker makes no more step at all."""
        with self._changed:
            steps, releases = self._steps.leave(worker), self._releases.leave(worker)
        self._carry_out_all(steps, releases)

    def enter(self, worker: int, phase: int) -> None:
        """Another worker takes the place; called with `changed` held."""
        for groups in (self._steps, self._releases):
            groups.enter(worker, phase)

    def awaited_by(self, worker: int) -> dict[int, list[int]]:
        """By optimizer: the workers that a worker waits for; called with `changed` held."""
        return {**self._steps.awaited_by(worker), **self._releases.awaited_by(worker)}

    def redo(
        self, change: StepApplied | StepHeld | HeldStepApplied, gradients: Gradients | None
    ) -> None:
        """Replay a logged change; its workers do not send it again."""
        if isinstance(change, StepHeld) and self._has_lost:
            # the snapshot has no positions of its workers
            return
        is_counted = isinstance(change, StepHeld) and change.restated
        for entry in () if is_counted else change.entries:
            groups = self._releases if isinstance(change, HeldStepApplied) else self._steps
            again = isinstance(change, StepHeld) or change.skipped
            groups.passed(change.optimizer, entry.worker, entry.phase, entry.step, again)
        if isinstance(change, StepApplied):
            self._apply_step(change, gradients)
        elif isinstance(change, StepHeld):
            self._apply_hold(change, gradients)
        else:
            self._apply_release(self._held.pop(change.optimizer), change)

    def baseline(self) -> tuple[StepsState, StepsState]:
        """The next pushes and releases of all workers; called with `changed` held."""
        return self._steps.state(), self._releases.state()

    def restore(self, steps: StepsState, releases: StepsState, is_last: bool) -> None:
        """Restore `baseline`; `is_last`: as if no worker had pushed in this phase."""
        self._has_lost = is_last
        for groups, state in ((self._steps, steps), (self._releases, releases)):
            groups.restore(msgspec.structs.replace(state, positions=[]) if is_last else state)

    def forget_workers(self) -> None:
        """Forget all workers and their steps."""
        self.clear()
        for groups in (self._steps, self._releases):
            groups.restore(StepsState(dict.fromkeys(range(self._worker_num), -1), []))

    def held_now(self) -> list[tuple[StepHeld, list[Array]]]:
        """The held steps, for a new log file; called with `changed` held."""
        return [
            (msgspec.structs.replace(kept.change, restated=True), described(kept.gradients)[3])
            for kept in self._held.values()
        ]

    def held_of(self, worker: int) -> int:
        """How many pushes of a worker wait for a factor; called with `changed` held."""
        entries = [entry for kept in self._held.values() for entry in kept.change.entries]
        return sum(entry.worker == worker for entry in entries)

    def clear(self) -> None:
        """Forget every step; called with `changed` held."""
        self._steps.clear()
        self._releases.clear()
        self._held.clear()

    def _refuse_uneven(self, optimizer: int, worker: int) -> None:
        """Fail a step at once if some of its workers clip and some do not.

        The step stays open, so that later workers fail, too. Called with `changed` held.
        """
        begun = self._steps.begun(optimizer, worker)
        assert begun is not None
        try:
            _agreed_hold(begun)
        except PlanError as error:
            self._steps.undone(begun.optimizer, begun.contributions)
            self._set_outcome(list(begun.contributions.values()), error)

    @property
    def _refuses(self) -> bool:
        return self._state.plan.on_nonfinite == "refuse"

    def _outcome(self, part: _Part | _Release, missing: Callable[[int, int], list[int]]) -> Outcome:
        message = part.message
        with self._changed:
            self._presence.wait(
                f"step {message.step} of optimizer {message.optimizer}",
                lambda: part.outcome is not None,
                lambda: missing(message.optimizer, part.peer.worker),
                until=self._has_outcome,
            )
        if isinstance(part.outcome, Exception):
            raise copied_for_thread(part.outcome)
        assert part.outcome is not None
        return part.outcome

    def _carry_out_all(
        self, steps: Sequence[Complete[_Part]], releases: Sequence[Complete[_Release]]
    ) -> None:
        for step in steps:
            self._carry_out(step)
        for release in releases:
            self._carry_out_held(release)

    def _carry_out(self, complete: Complete[_Part]) -> None:
        parts = list(complete.contributions.values())
        outcome = self._run(self._steps, complete, lambda: self._step(complete, parts))
        with self._changed:
            if isinstance(outcome, Exception) or not outcome.applied:
                self._steps.undone(complete.optimizer, complete.contributions)
            self._set_outcome(parts, outcome)

    def _control_signal(self, parts: Sequence[_Part | _Release]) -> ControlSignal:
        """The control signal for the replies of a step.

        All workers must receive it with one step, so it waits for a step of all workers.
        """
        with self._changed:
            roster = self._presence.roster
            expected = roster.active if roster.tolerates_loss else roster.worker_num
            return self._presence.call if len(parts) == expected else NO_SIGNAL

    def _carry_out_held(self, complete: Complete[_Release]) -> None:
        releases = list(complete.contributions.values())
        outcome = self._run(self._releases, complete, lambda: self._release(complete, releases))
        with self._changed:
            self._set_outcome(releases, outcome)

    def _run(
        self, groups: StepGroups[P], complete: Complete[P], act: Callable[[], Outcome]
    ) -> Outcome | Exception:
        try:
            # a snapshot of the progress finds the step applied, or still in progress
            with self._values_lock.shared():
                try:
                    return act()
                finally:
                    with self._changed:
                        groups.carried_out(complete)
        except Exception as error:
            return error

    def _set_outcome(self, parts: Sequence[_Part | _Release], outcome: Outcome | Exception) -> None:
        for part in parts:
            part.outcome = outcome
        self._has_outcome.notify_all()

    def _step(self, complete: Complete[_Part], parts: Sequence[_Part]) -> Outcome:
        hold = _agreed_hold(complete)
        with self._changed:
            # gradients may be clipped or computed again before they are applied
            self._held.pop(complete.optimizer, None)
        refusal = next((part.refusal for part in parts if part.refusal is not None), None)
        if refusal is not None and not hold and self._refuses:
            raise refusal
        skip = refusal is not None or any(part.message.skip for part in parts)
        gradients = None if skip else mean([part.gradients for part in parts])
        if hold:
            return self._hold(complete, gradients, refusal)
        # the step uses the hyper-parameters of the worker with the largest step
        furthest = max(parts, key=lambda part: part.message.step).message
        tables, dense, absent, arrays = described(gradients)
        change = StepApplied(
            complete.optimizer,
            complete.step,
            furthest.options,
            [worker_part(part.peer, part.message) for part in parts],
            tables,
            dense,
            absent,
            skipped=skip,
            call=self._control_signal(parts),
        )
        self._log.apply(change, arrays, lambda: self._apply_step(change, gradients))
        return _outcome_of(gradients, change.call)

    def _apply_step(self, change: StepApplied, gradients: Gradients | None) -> None:
        """Apply the change; recovery calls it, too."""
        with self._changed:
            self._held.pop(change.optimizer, None)
        if gradients is not None:
            self._state.step(change.optimizer, change.options, change.step, gradients)
        self._book(change)

    def _hold(
        self, complete: Complete[_Part], gradients: Gradients | None, refusal: GradientError | None
    ) -> Outcome:
        # gradients that a worker omits because they are not finite have an infinite norm
        square = float("inf")
        if gradients is not None:
            gradients, square = self._state.summed(gradients)
        tables, dense, absent, arrays = described(gradients)
        change = StepHeld(
            complete.optimizer,
            complete.step,
            [worker_part(part.peer, part.message) for part in complete.contributions.values()],
            square,
            tables,
            dense,
            absent,
            skipped=gradients is None,
            refusal="" if refusal is None else str(refusal),
        )
        self._log.apply(change, arrays, lambda: self._apply_hold(change, gradients))
        return Outcome(gradients is not None, square=square)

    def _apply_hold(self, change: StepHeld, gradients: Gradients | None) -> None:
        with self._changed:
            self._held[change.optimizer] = _HeldStep(change, gradients)
            self._steps.undone(change.optimizer, [entry.worker for entry in change.entries])

    def _release(self, complete: Complete[_Release], releases: Sequence[_Release]) -> Outcome:
        with self._changed:
            kept = self._held.pop(complete.optimizer, None)
        if kept is None:
            raise ProtocolError(
                f"step {complete.step}: gradients of optimizer {complete.optimizer} were held, and "
                "a checkpoint was loaded since"
            )
        factor = _agreed_factor(complete)
        skip = any(release.message.skip for release in releases)
        if kept.refusal is not None and not skip and self._refuses:
            raise kept.refusal
        furthest = max(releases, key=lambda release: release.message.step).message
        change = HeldStepApplied(
            complete.optimizer,
            complete.step,
            furthest.options,
            [_released_part(kept, release) for release in releases],
            factor,
            skipped=skip or kept.gradients is None,
            call=self._control_signal(releases),
        )
        return self._log.apply(change, [], lambda: self._apply_release(kept, change))

    def _apply_release(self, kept: _HeldStep, change: HeldStepApplied) -> Outcome:
        gradients = None
        if kept.gradients is not None and not change.skipped:
            gradients = scaled(kept.gradients, change.factor)
            self._state.step(change.optimizer, change.options, change.step, gradients)
        self._book(change)
        if gradients is not None:
            with self._changed:
                self._steps.done(change.optimizer, [entry.worker for entry in change.entries])
        return _outcome_of(gradients, change.call)

    def _book(self, change: StepApplied | HeldStepApplied) -> None:
        with self._changed:
            self._progress.book(change.entries, not change.skipped, change.call)


def worker_part(peer: Peer, message: Push) -> WorkerPart:
    """The part of a worker in the change that its push makes."""
    return WorkerPart(
        worker=peer.worker,
        started_at=peer.started_at,
        sequence=message.sequence,
        phase=message.phase,
        merged=message.merged,
        seen=message.seen,
        step=message.step,
    )


def _released_part(kept: _HeldStep, release: _Release) -> WorkerPart:
    """The part of a worker in a held step, with the sequence number of its release."""
    entry = kept.entry(release.peer.worker)
    assert entry is not None
    return msgspec.structs.replace(entry, sequence=release.message.sequence)


def _is_of(entry: WorkerPart | None, peer: Peer, sequence: int) -> bool:
    """True if the part belongs to this push."""
    return entry is not None and (entry.started_at, entry.sequence) == (peer.started_at, sequence)


def _outcome_of(gradients: Gradients | None, call: ControlSignal) -> Outcome:
    if gradients is None:
        return Outcome(applied=False, call=call)
    touched = {number: part.ids for number, part in gradients.tables.items()}
    return Outcome(True, touched, call=call)


def _agreed_hold(complete: Complete[_Part]) -> bool:
    holds = {worker: part.message.hold for worker, part in complete.contributions.items()}
    if len(set(holds.values())) > 1:
        clips = next(worker for worker, hold in holds.items() if hold)
        other = next(worker for worker, hold in holds.items() if not hold)
        raise PlanError(
            f"step {complete.step}: worker {clips} clips the gradients, worker {other} does not; "
            "clip_grad_norm_ must be called on every worker, or on none"
        )
    return any(holds.values())


def _agreed_factor(complete: Complete[_Release]) -> float:
    factors = {worker: r.message.factor for worker, r in complete.contributions.items()}
    if len(set(factors.values())) > 1:
        listed = ", ".join(f"worker {worker}: {factor:g}" for worker, factor in factors.items())
        raise PlanError(
            f"step {complete.step}: the workers clip by different factors ({listed}); every worker "
            "must call clip_grad_norm_ with the same number"
        )
    return next(iter(factors.values()))
