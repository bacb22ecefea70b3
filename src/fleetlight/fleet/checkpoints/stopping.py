# SPDX-License-Identifier: Apache-2.0
"""`Stopping`: a job that has a folder saves into it by itself, and stops when it is asked to.

SIGTERM only leaves a note. All workers act upon it at one place of the script, between two batches,
where everything that belongs to the last one is done: the steps of all optimizers, those of
schedulers, whatever the script does behind them.
"""

from __future__ import annotations

import os
import signal
import threading
import time
import weakref
from pathlib import Path
from types import FrameType
from typing import Any

from fleetlight.data.loader import ShardLoader
from fleetlight.errors import MembershipError
from fleetlight.fleet.checkpoints.persistables import save_alone, save_together
from fleetlight.fleet.checkpoints.resumption import Resumption, resumption_of
from fleetlight.fleet.checkpoints.stop_calls import StopCalls
from fleetlight.fleet.exit.exit_status import report_stopped, report_stops
from fleetlight.fleet.job import Job
from fleetlight.launch.status import RESUME_CODE
from fleetlight.observe.log import logger
from fleetlight.ps.messages.base import ControlSignal
from fleetlight.strategy import CheckpointConfigs


class Stopped(SystemExit):
    """The job was asked to stop, and has saved what it needs to go on."""

    def __init__(self) -> None:
        super().__init__(RESUME_CODE)


class Terminations:
    """Notes SIGTERM while it is open; a second one ends the process at once."""

    def __init__(self) -> None:
        self.seen = False
        self._pid = os.getpid()
        self._before: Any = None
        self._is_open = threading.current_thread() is threading.main_thread()
        if self._is_open:
            self._before = signal.signal(signal.SIGTERM, self._note)
        else:
            logger.warning("fleet.init was called in a thread: SIGTERM ends the job unsaved")

    def noted(self) -> None:
        """What else is to be done at the first one."""

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.seen or os.getpid() != self._pid:
            # a child that was forked is ended by who has made it
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        self.seen = True
        self.noted()
        if callable(self._before):
            # the script has a handler of its own
            self._before(number, frame)

    def close(self) -> None:
        """SIGTERM is what it was."""
        if self._is_open and signal.getsignal(signal.SIGTERM) == self._note:
            signal.signal(signal.SIGTERM, self._before)
        self._is_open = False


class Stopping(Terminations):
    """A worker's part in saving, stopping and going on."""

    def __init__(self, job: Job, calls: StopCalls) -> None:
        self._job, self._calls = job, calls
        # the script may change its working directory
        self._folder = str(Path(job.strategy.checkpoint).absolute())
        # what may refuse comes first
        self._resumption: Resumption | None = resumption_of(job, self._folder, self._configs.via)
        super().__init__()
        #: whose batches are trained on
        self._trained: weakref.WeakSet[ShardLoader[Any]] = weakref.WeakSet()
        self._has_stepped = False
        #: where it is right now, while it saves
        self._place: int | None = None
        #: how many saves have been called for and made
        self._made = 0
        self._saved_step, self._saved_at = 0, time.monotonic()
        self.is_over = False
        report_stops(job.role)

    @property
    def _configs(self) -> CheckpointConfigs:
        # a script may give its strategy with the optimizer
        return self._job.strategy.checkpoint_configs

    # -- going on

    def place(self, loader: ShardLoader[Any], number: int) -> None:
        """A loader was made, as the `number`th."""
        if self._resumption is not None:
            self._resumption.place(loader, number)

    def take_up(self) -> None:
        """Training begins: what an earlier start has saved is put in place, once."""
        self._job.schedulers.warn_of_others([plan.optimizer for plan in self._job.optimizers])
        resumption = self._resumption
        if resumption is not None and resumption.take_up(self._job):
            self._saved_step = self._job.step

    @property
    def saves(self) -> list[int]:
        """How many saves have been made, and behind which step the last one: alike on all."""
        return [self._made, self._saved_step]

    @saves.setter
    def saves(self, saves: list[int]) -> None:
        self._made, self._saved_step = saves

    @property
    def place_now(self) -> int | None:
        """Between two batches of which loader the script is, while it saves."""
        return self._place

    # -- where the script is

    def between(self, loader: ShardLoader[Any]) -> None:
        """It is between two batches of a loader."""
        number = self._job.loaders.index(loader)
        if self._job.models:
            self.take_up()
        if self._resumption is not None:
            self._resumption.between(number)
        if loader in self._trained and self._has_stepped:
            self._has_stepped = False
            self._act(number)

    def step_made(self) -> None:
        """An optimizer has made a step."""
        self._has_stepped = True
        loader = self._loader_in_hand()
        if loader is not None:
            self._trained.add(loader)
        elif threading.current_thread() is threading.main_thread():
            # who feeds itself has no better place
            self._act(None)

    def _loader_in_hand(self) -> ShardLoader[Any] | None:
        weights = self._job.weights
        if weights is None or weights.now is None:
            return None
        return next((one for one in self._job.loaders if one.share is weights.now), None)

    # -- what is to be done there

    def _act(self, place: int | None) -> None:
        self._place = place
        try:
            call = self._calls.called(self._wish())
            if call.stop:
                self._stop()
            elif call.saves > self._made or self._is_due_by_steps():
                self._made = max(self._made, call.saves)
                self._save(background=True)
        finally:
            self._place = None

    def _wish(self) -> ControlSignal:
        """What this worker calls for. The clock that counts is worker 0's."""
        every_s = self._configs.every_s
        is_due = every_s and time.monotonic() - self._saved_at >= every_s
        due = is_due and self._job.group.index == 0
        return ControlSignal(self.seen, self._made + 1 if due else 0)

    def _is_due_by_steps(self) -> bool:
        every = self._configs.every_steps
        return bool(every) and self._job.step - self._saved_step >= every

    def _save(self, *, background: bool) -> None:
        self._saved_step, self._saved_at = self._job.step, time.monotonic()
        save = save_together if self._calls.in_lockstep else save_alone
        save(self._job, self._folder, background=background, via=self._configs.via)

    def left_alone(self, error: MembershipError) -> None:
        """Others do not come whom this worker waits for: where they stop, so does it."""
        is_here = threading.current_thread() is threading.main_thread()
        if not is_here or not self._calls.is_left_alone(error, was_asked=self.seen):
            return
        if self.is_over:
            # in a `finally` of the script
            raise Stopped
        for loader in self._trained:
            if loader.cursor.is_being_read and not self._has_stepped:
                loader.cursor.put_back()
        self._stop()

    def _stop(self) -> None:
        job = self._job
        if job.group.index == 0:
            logger.info("asked to stop: saving at step %d", job.step)
        self._calls.stopping(self._configs.grace_s)
        self._save(background=False)
        self.is_over = True
        self._calls.stopped()
        report_stopped(job.role, job.step, self._folder)
        raise Stopped

    # -- when nobody else watches

    def noted(self) -> None:
        """Without a launcher a script that makes no step would never end."""
        if self._job.role.error_file is None:
            timer = threading.Timer(self._configs.grace_s, self._give_up)
            timer.daemon = True
            timer.start()

    def _give_up(self) -> None:
        logger.error(
            "no step has ended within %g s of SIGTERM: what was saved last remains in %s",
            self._configs.grace_s,
            self._folder,
        )
        os._exit(128 + signal.SIGTERM)


def watch_in_worker(job: Job, calls: StopCalls) -> None:
    """What a worker does from `fleet.init` on, where the strategy names a folder."""
    if job.strategy.checkpoint:
        job.stopping = Stopping(job, calls)
        job.closers.callback(job.stopping.close)
