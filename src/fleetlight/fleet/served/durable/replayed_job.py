# SPDX-License-Identifier: Apache-2.0
"""`ReplayedJob`: a worker whose next incarnation resumes at its last step.

It adds the replay to `ServedJob` and `ServedSteps`, which do not depend on it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from fleetlight.fleet.served.durable.replay import WorkerReplay
from fleetlight.fleet.served.job import CatchingUpJob, ServedJob
from fleetlight.fleet.served.session import ServerSession
from fleetlight.fleet.served.steps import ServedSteps, served_programs
from fleetlight.fleet.training.optimizer import ManagedOptimizer
from fleetlight.ps.update import Update
from fleetlight.ps.worker.communicator.base import norm_of
from fleetlight.ps.worker.replay.step_journal import StepJournal
from fleetlight.ps.worker.replay.worker_journal import WorkerJournal


def replay_of(journal: StepJournal, on_change: Callable[[bool], None]) -> WorkerReplay | None:
    """The replay that belongs to a journal; `on_change` as in `WorkerReplay`."""
    return WorkerReplay(journal, on_change) if isinstance(journal, WorkerJournal) else None


def served_job(replay: WorkerReplay | None, **parts: Any) -> ServedJob:
    """The job of a worker, with a replay if there is one."""
    return ServedJob(**parts) if replay is None else ReplayedJob(replay=replay, **parts)


@dataclasses.dataclass(kw_only=True)
class ReplayedJob(CatchingUpJob):
    """Skips the steps that the servers have applied, and logs a resume point with each other."""

    replay: WorkerReplay

    def __post_init__(self) -> None:
        super().__post_init__()
        self.replay.attach(self, lambda: self.session.bound.dense)
        self.session.before_start = self.replay.begin

    def _make_steps(self, managed: ManagedOptimizer) -> ServedSteps:
        return ReplayedSteps(managed, self.session, self.replay)

    def _clip(self, updates: list[Update], max_norm: float, norm_type: float) -> float:
        if self.replay.is_skipping:
            return norm_of(updates, norm_type)
        return super()._clip(updates, max_norm, norm_type)


class ReplayedSteps(ServedSteps):
    """The steps of a worker with a replay."""

    def __init__(
        self, managed: ManagedOptimizer, session: ServerSession, replay: WorkerReplay
    ) -> None:
        super().__init__(managed, session, served_programs)
        self._replay = replay
        #: True while a step is skipped
        self._is_skipped = False

    @property
    def needs_torch(self) -> bool:
        """True: each step is skipped or logged."""
        return True

    def _push(self, session: ServerSession, skip: bool) -> None:
        self._is_skipped = self._replay.skip_step(session.number_of(self.optimizer))
        if not self._is_skipped:
            super()._push(session, skip)
            return
        self._applied = self._replay.has_applied
        self._hide_gradients(everything=True)

    def _collect(self, session: ServerSession) -> Update:
        update = super()._collect(session)
        update.resume_point = self._replay.resume_point(session.number_of(self.optimizer))
        return update

    def _finish_push(self, session: ServerSession) -> None:
        if not self._is_skipped:
            super()._finish_push(session)
            return
        self._is_skipped = False
        self._tell_scaler()
        self._replay.after_skip(session.number_of(self.optimizer))
