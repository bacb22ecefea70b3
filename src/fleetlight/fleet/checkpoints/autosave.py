# SPDX-License-Identifier: Apache-2.0
"""`JobAutosave`: a job with a checkpoint folder saves automatically, and stops at SIGTERM.

The signal only sets a flag. All workers act on it at one place of the script, between two batches:
there, everything that belongs to the last batch is done, such as the steps of all optimizers and
schedulers.
"""

from __future__ import annotations

import os
import signal
import threading
import time
import weakref
from types import FrameType
from typing import Any

from fleetlight.data.loader import ShardLoader
from fleetlight.errors import MembershipError
from fleetlight.fleet.checkpoints.persistables import save_alone, save_together
from fleetlight.fleet.checkpoints.resumption import Resumption, resumption_of
from fleetlight.fleet.checkpoints.save_options import SaveOptions
from fleetlight.fleet.checkpoints.stop_agreement import StopAgreement
from fleetlight.fleet.exit.exit_status import report_saves_at_sigterm, report_stopped
from fleetlight.fleet.job import Job
from fleetlight.fleet.parts.background import in_main_thread
from fleetlight.launch.exit_codes import RESUME_CODE
from fleetlight.observe.log import logger
from fleetlight.store import absolute
from fleetlight.strategy import CheckpointConfigs
from fleetlight.wire.control_signals import ControlSignal


class Stopped(SystemExit):
    """The job was asked to stop, and has saved what it needs to resume."""

    def __init__(self) -> None:
        super().__init__(RESUME_CODE)


#: Slurm signals all processes of a job, and `fleetlight member` passes the signal on: within this
#: time both are one request
_SAME_S = 2.0


class SigtermHandler:
    """Notes SIGTERM until it is closed; a later, second SIGTERM ends the process at once."""

    def __init__(self, *, watches: bool = True) -> None:
        """`watches`: False where another handler acts on the signal."""
        self.seen = False
        self._seen_at = 0.0
        self._pid = os.getpid()
        self._before: Any = None
        self._is_open = watches and in_main_thread()
        if self._is_open:
            self._before = signal.signal(signal.SIGTERM, self._note)
        elif watches:
            logger.warning(
                "fleet.init was called in a thread, so SIGTERM ends the job without a save; call "
                "it in the main thread"
            )

    def on_sigterm(self) -> None:
        """Hook for the first SIGTERM."""

    def _note(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._pid:
            # a forked child has no part in the job
            _end_by(number)
        if self.seen:
            if time.monotonic() - self._seen_at > _SAME_S:
                _end_by(number)
            return
        self.seen, self._seen_at = True, time.monotonic()
        self.on_sigterm()
        if callable(self._before):
            # the script's own handler
            self._before(number, frame)

    def close(self) -> None:
        """Restore the handler of SIGTERM."""
        if self._is_open and signal.getsignal(signal.SIGTERM) == self._note:
            signal.signal(signal.SIGTERM, self._before)
        self._is_open = False


def _end_by(number: int) -> None:
    """End this process by a signal."""
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


class JobAutosave(SigtermHandler):
    """A worker's part in saving, stopping and resuming a job."""

    def __init__(self, job: Job, agreement: StopAgreement) -> None:
        self._job, self._agreement = job, agreement
        # the script may change its working directory
        self._folder = absolute(job.strategy.checkpoint)
        # this may refuse, so it comes first
        self._resumption: Resumption | None = None
        if not job.replay.joins:
            self._resumption = resumption_of(job, self._folder, self._configs.via)
        super().__init__(watches=job.departure is None)
        #: loaders with batches that the script has trained on
        self._trained: weakref.WeakSet[ShardLoader[Any]] = weakref.WeakSet()
        self._has_stepped = False
        #: the number of the loader between whose batches a save takes place
        self._loader_at_save: int | None = None
        #: the number of saves so far
        self._saves = 0
        self._saved_step, self._saved_at = 0, time.monotonic()
        self.has_stopped = False
        report_saves_at_sigterm(job.role)

    @property
    def _configs(self) -> CheckpointConfigs:
        # a script may give its strategy with the optimizer
        return self._job.strategy.checkpoint_configs

    # -- resuming

    def position_loader(self, loader: ShardLoader[Any], number: int) -> None:
        """Set the position of a new loader, the `number`th."""
        if self._resumption is not None:
            self._resumption.position_loader(loader, number)

    def resume(self) -> None:
        """Load the checkpoint of an earlier start when training begins; once."""
        self._job.schedulers.warn_of_unattached(
            [managed.optimizer for managed in self._job.optimizers]
        )
        resumption = self._resumption
        if resumption is not None and resumption.resume(self._job):
            self._saved_step = self._job.step

    @property
    def saves(self) -> list[int]:
        """The number of saves and the step of the last one; equal on all workers."""
        return [self._saves, self._saved_step]

    @saves.setter
    def saves(self, saves: list[int]) -> None:
        self._saves, self._saved_step = saves

    @property
    def loader_at_save(self) -> int | None:
        """The number of the loader between whose batches a save takes place."""
        return self._loader_at_save

    # -- the place of the script

    def between(self, loader: ShardLoader[Any]) -> None:
        """Save or stop, if due: the script is between two batches of a loader."""
        number = self._job.loaders.index(loader)
        if self._job.models:
            self.resume()
        if self._resumption is not None:
            self._resumption.between(number)
        if loader in self._trained and self._has_stepped:
            self._has_stepped = False
            self._save_or_stop(number)

    def step_made(self) -> None:
        """Note that an optimizer has made a step."""
        self._has_stepped = True
        loader = self._current_loader()
        if loader is not None:
            self._trained.add(loader)
        elif in_main_thread():
            # a script without sharded loaders has no better place
            self._save_or_stop(None)

    def _current_loader(self) -> ShardLoader[Any] | None:
        weights = self._job.batch_weights
        if weights is None or weights.now is None:
            return None
        return next((one for one in self._job.loaders if one.share is weights.now), None)

    # -- saving and stopping

    def _save_or_stop(self, loader: int | None) -> None:
        self._loader_at_save = loader
        try:
            call = self._agreement.agree(self._request())
            if call.stop:
                self._stop()
            elif call.saves > self._saves or self._is_due_by_steps():
                self._saves = max(self._saves, call.saves)
                self._save(background=True)
        finally:
            self._loader_at_save = None

    def _request(self) -> ControlSignal:
        """This worker's request; worker 0 alone decides by the clock."""
        every_s = self._configs.every_s
        is_due = every_s and time.monotonic() - self._saved_at >= every_s
        due = is_due and self._job.group.index == 0
        return ControlSignal(self.seen, self._saves + 1 if due else 0)

    def _is_due_by_steps(self) -> bool:
        every = self._configs.every_steps
        return bool(every) and self._job.step - self._saved_step >= every

    def _save(self, *, background: bool) -> None:
        self._saved_step, self._saved_at = self._job.step, time.monotonic()
        save = save_together if self._agreement.in_lockstep else save_alone
        configs = self._configs
        how = SaveOptions(background=background, via=configs.via, base_every=configs.base_every)
        save(self._job, self._folder, how)

    def peer_missing(self, error: MembershipError) -> None:
        """Stop if the workers that this one waits for have stopped."""
        if not in_main_thread() or not self._agreement.stops_with_peers(error, was_asked=self.seen):
            return
        if self.has_stopped:
            # called in a `finally` of the script
            raise Stopped
        for loader in self._trained:
            if loader.cursor.is_being_read and not self._has_stepped:
                loader.cursor.put_back()
        self._stop()

    def _stop(self) -> None:
        job = self._job
        if job.group.index == 0:
            logger.info("stop requested: saving at step %d", job.step)
        self._agreement.prepare_stop(self._configs.grace_s)
        self._save(background=False)
        self.has_stopped = True
        self._agreement.note_stopped()
        report_stopped(job.role, job.step, self._folder)
        raise Stopped

    # -- without a launcher

    def on_sigterm(self) -> None:
        """Start a timer: without a launcher, a script that makes no step would never end."""
        if self._job.role.error_file is None:
            timer = threading.Timer(self._configs.grace_s, self._give_up)
            timer.daemon = True
            timer.start()

    def _give_up(self) -> None:
        logger.error(
            "no step has ended within %g s of SIGTERM: exiting; the last checkpoint is in %s",
            self._configs.grace_s,
            self._folder,
        )
        os._exit(128 + signal.SIGTERM)


def watch_in_worker(job: Job, agreement: StopAgreement) -> None:
    """Save, stop and resume automatically from now on, where the strategy names a folder."""
    if job.strategy.checkpoint:
        job.autosave = JobAutosave(job, agreement)
        job.closers.callback(job.autosave.close)
