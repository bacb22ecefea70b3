# SPDX-License-Identifier: Apache-2.0
"""`PushHandler`: applies pushes and exchanges, and makes their replies."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleetlight.errors import GradientError, PlanError
from fleetlight.kernels import member
from fleetlight.ps.changes import (
    Baseline,
    DifferencesAdded,
    HeldStepApplied,
    LedgerState,
    PhaseEnded,
    StepApplied,
    StepHeld,
    StepsState,
    WorkerPart,
)
from fleetlight.ps.gradients import Gradients, described, not_finite, refusal
from fleetlight.ps.messages import Apply, GeoExchange, GeoExchangeReply, Push, Pushed
from fleetlight.ps.server.shared_exclusive_lock import SharedExclusiveLock
from fleetlight.ps.server.steps.prefetched_ids import PrefetchedBatch, PrefetchedIds
from fleetlight.ps.server.steps.progress import TrainingProgress
from fleetlight.ps.server.steps.request_dedup import Reply, RequestDedup
from fleetlight.ps.server.steps.sync_steps import Outcome, SyncStepCoordinator, worker_part
from fleetlight.ps.server.workers.presence import PresenceMonitor
from fleetlight.ps.server.workers.roster import Peer
from fleetlight.ps.server.write_ahead_log import WriteAheadLog
from fleetlight.ps.tables.server_state import ServerState
from fleetlight.ps.update import Ids
from fleetlight.ps.wire_forms import Output, no_output

Array = NDArray[Any]
_NO_IDS: Ids = np.empty(0, np.int64)


class PushHandler:
    """In sync mode, all workers push one step together; in other modes, each push is a step."""

    def __init__(
        self,
        state: ServerState,
        presence: PresenceMonitor,
        values_lock: SharedExclusiveLock,
        log: WriteAheadLog,
        worker_num: int,
        *,
        places: int,
    ) -> None:
        self._state = state
        self._log = log
        self._plan = state.plan
        self._steps_together = state.plan.steps_together
        #: several replies have the same dense values
        self._shares_values = self._steps_together and places > 1
        self._presence = presence
        self._changed = presence.changed
        self._has_advanced = presence.condition()
        self._values_lock = values_lock
        self.progress = TrainingProgress(worker_num)
        self._coordinator = SyncStepCoordinator(
            state, presence, values_lock, self.progress, log, worker_num
        )
        self._requests = RequestDedup(presence, self.progress.marks)
        self._prefetched = PrefetchedIds()

    def push(
        self, peer: Peer, message: Push, arrays: Sequence[Array], output: Output = no_output
    ) -> Reply:
        """Apply the gradients of one worker."""
        return self._once(peer, message, arrays, output, lambda: self._push(peer, message, arrays))

    def apply(
        self, peer: Peer, message: Apply, arrays: Sequence[Array], output: Output = no_output
    ) -> Reply:
        """Apply held gradients, times a factor."""
        return self._once(peer, message, arrays, output, lambda: self._apply(peer, message))

    def _once(
        self,
        peer: Peer,
        message: Push | Apply,
        arrays: Sequence[Array],
        output: Output,
        carry_out: Callable[[], Outcome],
    ) -> Reply:
        ahead = self._state.ahead_ids(message, arrays, str(peer))

        def reply(outcome: Outcome, is_last: bool = True) -> Reply:
            return self._push_reply(peer, message, ahead, outcome, output, is_last)

        return self._requests.once(
            peer,
            message,
            lambda: reply(carry_out()),
            lambda is_last: reply(self._outcome_again(peer, message), is_last),
        )

    def exchange(
        self, peer: Peer, message: GeoExchange, arrays: Sequence[Array], output: Output = no_output
    ) -> Reply:
        """Add the differences of one worker, in geo mode."""
        if not self._plan.exchanges_differences:
            raise PlanError(f"{peer} exchanges differences, but the mode is {self._plan.mode!r}")
        differences = self._state.differences(message, arrays, str(peer))
        return self._requests.once(
            peer,
            message,
            lambda: self._exchange_reply(self._exchange(peer, message, differences, output)),
            lambda _: self._exchange_reply(self._reread(message, differences, output)),
            # the reply may be large, and a repeated request can read the rows again
            keep=False,
        )

    def remember(self, peer: Peer, pulled: PrefetchedBatch) -> None:
        """Note ids that a worker prefetches; call this before reading their rows."""
        if self._steps_together:
            with self._changed:
                self._prefetched.remember(peer.worker, pulled)

    def wait_for_steps(self, phase: int, at_least: int) -> tuple[int, int]:
        """Wait for that many steps of every worker; return the version and the fewest steps."""
        clocks = self.progress.clocks
        with self._changed:
            self._presence.wait(
                f"a pull after {at_least} steps of every worker",
                lambda: clocks.all_have(phase, at_least),
                lambda: clocks.behind(phase, at_least),
                until=self._has_advanced,
            )
            return self.progress.versions.version, clocks.slowest(phase)

    def check_has(self, worker: int, started_at: int, acknowledged: int) -> None:
        """Refuse a worker whose confirmed pushes this server lost; called with `changed` held."""
        self.progress.marks.check_has(worker, started_at, acknowledged)

    def forget_prefetched(self, worker: int) -> None:
        """The worker restarted and has prefetched nothing; called with `changed` held."""
        self._prefetched.forget(worker)

    def end(self, worker: int, phase: int) -> None:
        """The worker makes no more step in this phase; this may complete steps of others."""
        with self._changed:
            self.progress.clocks.end(worker, phase)
            self._log.append(PhaseEnded(worker, phase))
            carry_out = self._coordinator.end(worker, phase)
            self._has_advanced.notify_all()
        carry_out()

    def awaited_by(self, worker: int) -> dict[int, list[int]]:
        """By optimizer: the workers that a worker waits for; called with `changed` held."""
        return self._coordinator.awaited_by(worker)

    def leave(self, worker: int) -> None:
        """The worker makes no more step at all."""
        with self._changed:
            self.progress.clocks.leave(worker)
            self._has_advanced.notify_all()
        self._coordinator.leave(worker)

    def enter(self, worker: int, phase: int) -> None:
        """Another worker takes the place; called with `changed` held."""
        self.progress.clocks.enter(worker, phase)
        self.progress.skipped.discard(worker)
        self._prefetched.forget(worker)
        self._coordinator.enter(worker, phase)

    def begin(self, epoch: int) -> None:
        """Forget all steps in progress, because a checkpoint replaces the values."""
        with self._changed:
            self.progress.marks.begin(epoch)
            self._coordinator.clear()
            self._prefetched.clear()

    def _push(self, peer: Peer, message: Push, arrays: Sequence[Array]) -> Outcome:
        self._presence.roster.check_pushes(peer.worker)
        gradients = self._state.gradients(message, arrays, str(peer))
        self._presence.at_step(peer.worker, message.step)
        refused = self._refusal_of(peer, message, gradients)
        if self._steps_together:
            outcome = self._coordinator.push(peer, message, gradients, refused)
            return self._with_others(outcome, message, gradients)
        if message.hold:
            raise PlanError(f"{peer} clips by the norm over all servers, which only sync mode does")
        if refused is not None and self._plan.on_nonfinite == "refuse":
            raise refused
        return self._push_alone(peer, message, gradients, message.skip or refused is not None)

    def _apply(self, peer: Peer, message: Apply) -> Outcome:
        return self._with_others(self._coordinator.apply(peer, message), message)

    def _with_others(
        self, outcome: Outcome, message: Push | Apply, own: Gradients | None = None
    ) -> Outcome:
        """Add the ids that the pushes of other workers have changed, if the worker asks for them.

        The gradients of a release came with an earlier push, so its outcome names all ids.
        """
        by_others = {}
        for number in message.reports:
            ids = outcome.touched.get(number, _NO_IDS)
            mine = None if own is None else own.tables.get(number)
            if mine is not None and len(ids):
                ids = ids[~member(ids, mine.ids)]
            by_others[number] = ids
        return dataclasses.replace(outcome, by_others=by_others) if by_others else outcome

    def _push_alone(self, peer: Peer, message: Push, gradients: Gradients, skip: bool) -> Outcome:
        tables, dense, absent, arrays = described(None if skip else gradients)
        change = StepApplied(
            message.optimizer,
            message.step,
            message.options,
            [worker_part(peer, message)],
            tables,
            dense,
            absent,
            skipped=skip,
        )
        with self._values_lock.shared():
            self._log.apply(change, arrays, lambda: self._apply_step(change, gradients))
        return Outcome(applied=not skip)

    def _apply_step(self, change: StepApplied, gradients: Gradients | None) -> None:
        """Apply the change; recovery calls it, too."""
        if gradients is not None and not change.skipped:
            self._state.step(change.optimizer, change.options, change.step, gradients)
        self._book(change.entries, applied=not change.skipped)

    def _exchange(
        self, peer: Peer, message: GeoExchange, differences: Gradients, output: Output
    ) -> list[Array]:
        self._presence.roster.check_pushes(peer.worker)
        refused = self._refusal(f"{peer} sent a difference (step {message.step})", differences)
        self._presence.at_step(peer.worker, message.step)
        if refused is not None:
            raise refused
        # an exchange in several messages counts once
        steps = 0 if message.more else 1
        entry = WorkerPart(peer.worker, peer.started_at, message.sequence, merged=steps)
        change = DifferencesAdded(entry, message.step, message.tables, message.dense, message.more)
        _, _, _, arrays = described(differences)
        with self._values_lock.shared():
            return self._log.apply(
                change,
                arrays,
                lambda: self._apply_differences(change, differences, message.wants, output),
            )

    def _apply_differences(
        self,
        change: DifferencesAdded,
        differences: Gradients,
        wants: bool,
        output: Output = no_output,
    ) -> list[Array]:
        """Apply the change; recovery calls it, too."""
        found = self._state.exchange(differences, wants, change.step, output)
        self._book([change.entry], applied=not change.more)
        return found

    def redo(
        self,
        change: StepApplied | StepHeld | HeldStepApplied | DifferencesAdded,
        arrays: Sequence[Array],
    ) -> None:
        """Replay a logged change."""
        if isinstance(change, DifferencesAdded):
            self._apply_differences(
                change, self._state.differences(change, arrays, "the journal"), False
            )
            return
        gradients = None
        if not isinstance(change, HeldStepApplied) and not change.skipped:
            gradients = self._state.unpacked(change, arrays, "a change in the journal")
        if self._steps_together:
            self._coordinator.redo(change, gradients)
        else:
            assert isinstance(change, StepApplied), change
            self._apply_step(change, gradients)

    def baseline(self) -> tuple[LedgerState, StepsState, StepsState]:
        """The progress of all workers; called with `changed` held."""
        return self.progress.state(), *self._coordinator.baseline()

    def held_now(self) -> list[tuple[StepHeld, list[Array]]]:
        """The steps that wait for a factor; called with `changed` held."""
        return self._coordinator.held_now()

    def last_push(self, worker: int, started_at: int) -> tuple[int, int]:
        """The last push of a worker, and the number of held ones; called with `changed` held."""
        return self.progress.marks.last(worker, started_at), self._coordinator.held_of(worker)

    def restore(self, state: Baseline, *, is_last: bool) -> None:
        """Restore `baseline`, before the first push.

        `is_last`: later changes were not logged; accept any next step of the workers.
        """
        self.progress.restore(state.ledger)
        self._coordinator.restore(state.steps, state.releases, is_last)

    def forget_workers(self) -> None:
        """Forget the workers, but keep the values."""
        self.progress.forget_workers()
        self._coordinator.forget_workers()

    def _outcome_again(self, peer: Peer, message: Push | Apply) -> Outcome:
        """The outcome of a worker's last push, which it sends again."""
        with self._changed:
            held = self._coordinator.held(peer, message)
            if held is not None:
                return held
            return Outcome(peer.worker not in self.progress.skipped, call=self.progress.call)

    def _reread(self, message: GeoExchange, differences: Gradients, output: Output) -> list[Array]:
        return self._state.reread(differences, message.step, output) if message.wants else []

    def _book(self, entries: Sequence[WorkerPart], applied: bool) -> None:
        with self._changed:
            self.progress.book(entries, applied)
            self._has_advanced.notify_all()

    def _refusal_of(self, peer: Peer, message: Push, gradients: Gradients) -> GradientError | None:
        if message.skip:
            return None
        if message.refusal:
            return GradientError(message.refusal)
        # workers check first, because a server has only a part of the step
        return self._refusal(f"{peer} pushed a gradient (step {message.step})", gradients)

    def _refusal(self, what: str, gradients: Gradients) -> GradientError | None:
        """The error for values that are not finite; None if the server may apply them."""
        if self._plan.on_nonfinite == "apply":
            return None
        where = not_finite(gradients, self._plan)
        return None if where is None else GradientError(refusal(what, where, "on this server"))

    def _push_reply(
        self,
        peer: Peer,
        message: Push | Apply,
        ahead: Sequence[Ids],
        outcome: Outcome,
        output: Output,
        is_last: bool,
    ) -> Reply:
        arrays: list[Array] = []
        for number, ids in zip(message.ahead, ahead, strict=True):
            arrays += self._state.table(number).encoded(ids, False, message.step, output)
        if message.wants_dense:
            # copies of the shared copy are faster: it is in the cache
            arrays += self._state.dense.values(no_output if self._shares_values else output)
        changed: list[PrefetchedBatch] = []
        # rows prefetched after it belong to the reply to a later push
        if is_last and not (isinstance(message, Push) and message.hold):
            for pulled in self._take_prefetched(peer, message.optimizer):
                rows = self._changed_rows(pulled, outcome, message.step)
                if rows:
                    changed.append(pulled)
                    arrays.extend(rows)
        arrays += outcome.by_others.values()
        with self._changed:
            version, slowest = (
                self.progress.versions.version,
                self.progress.clocks.slowest(message.phase),
            )
            call = outcome.call if self._steps_together else self._presence.call
        return Pushed(
            version,
            slowest,
            outcome.applied,
            outcome.square,
            [pulled.table for pulled in changed],
            [pulled.batch for pulled in changed],
            list(outcome.by_others),
            call,
        ), arrays

    def _take_prefetched(self, peer: Peer, optimizer: int) -> list[PrefetchedBatch]:
        """Take the prefetched ids of the optimizer's tables: only its steps change these rows."""
        mine = {n for n, table in enumerate(self._plan.tables) if table.optimizer == optimizer}
        with self._changed:
            return self._prefetched.take(peer.worker, mine)

    def _changed_rows(self, pulled: PrefetchedBatch, outcome: Outcome, step: int) -> list[Array]:
        """The positions and values of the prefetched rows that the step changed; [] if none."""
        touched = outcome.touched.get(pulled.table)
        if touched is None or not len(touched):
            return []
        positions = np.flatnonzero(member(pulled.ids, touched))
        if not len(positions):
            return []
        ids = pulled.ids[positions]
        return [positions, *self._state.table(pulled.table).encoded(ids, False, step, no_output)]

    def _exchange_reply(self, arrays: list[Array]) -> Reply:
        with self._changed:
            version, slowest = self.progress.versions.version, self.progress.clocks.slowest(0)
            call = self._presence.call
        return GeoExchangeReply(version, slowest, call), arrays
