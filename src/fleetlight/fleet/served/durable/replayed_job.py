# SPDX-License-Identifier: Apache-2.0
"""`ReplayedJob`: a worker whose next incarnation resumes at its last step.

It adds the replay to `ServedJob` and `ServedSteps`, which do not depend on it.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

import fleetlight.checkpoint as checkpoint
from fleetlight.checkpoint import WorkerState
from fleetlight.checkpoint.state.rng import RngStateCache
from fleetlight.errors import CheckpointError, ComebackError
from fleetlight.fleet.checkpoints.worker_state import load_replayed, saved_values
from fleetlight.fleet.job import Job
from fleetlight.fleet.parts.background import in_main_thread
from fleetlight.fleet.protocols import Purpose
from fleetlight.fleet.served.elastic.unserved_tensors import UnservedTensors
from fleetlight.fleet.served.job import CatchingUpJob, ServedJob
from fleetlight.fleet.served.session import ServerSession
from fleetlight.fleet.served.steps import ServedSteps, served_programs
from fleetlight.fleet.training.optimizer import ManagedOptimizer
from fleetlight.observe.log import logger
from fleetlight.ps.update import Update
from fleetlight.ps.worker.communicator.base import Communicator, norm_of
from fleetlight.ps.worker.replay.commit_log import ResumePoint
from fleetlight.ps.worker.replay.step_journal import StepJournal
from fleetlight.ps.worker.replay.worker_journal import WorkerJournal
from fleetlight.torch_compat.tensors import assign, version

Position = Mapping[str, Any]

#: a tensor of so many bytes is saved only after it has changed
_LARGE = 1 << 16
#: elements that are compared, since writes by `.data` and NumPy do not change torch's version
_SAMPLED = 1 << 10

_DIFFERENT = (
    "this worker was restarted, and must skip the last step of its earlier incarnation, which the "
    "servers have; but the script {step}. Script and data must not change between incarnations, "
    "and the choice of batches must not depend on the time or on unseeded random numbers. Restart "
    "all processes; add --resume only if script and data are unchanged"
)
_LOST = (
    "this worker was restarted alone, but cannot resume at the step where it died: {why}; restart "
    "all processes, as fleetrun does with --max_restarts"
)
_NO_BATCH = (
    "its last step used a batch that no loader of fleet.shard returned to the training thread"
)
_ANOTHER_BATCH = "makes a step with {now}, not with {before}"


@dataclasses.dataclass(frozen=True)
class _BatchMark:
    """The first batch since the last step."""

    #: number of its loader, and the positions of all loaders
    loader: int
    positions: list[Position]
    replies: int
    meetings: int


class WorkerReplay:
    """The replay of a worker with a journal, for the thread that trains."""

    joins = False

    def __init__(self, journal: WorkerJournal, on_change: Callable[[bool], None]) -> None:
        """Calls `on_change` when it changes whether this worker may be restarted alone."""
        self._journal, self._replies = journal, journal.replies
        self._on_change = on_change
        self._job: Job | None = None
        self._served: Callable[[], Sequence[Tensor]] = lambda: ()
        self._is_restartable = False
        self._rng = RngStateCache()
        self._unserved = UnservedTensors()
        self._mark: _BatchMark | None = None
        #: True after a step since the mark
        self._is_stale = True
        #: by loader: the number of calls before its first batch
        self._calls_before: dict[int, int] = {}
        #: by loader: checksum of the records in its last batch since the mark
        self._records: dict[int, int] = {}
        #: by name of a large tensor: its fingerprint, and its key in the blob store
        self._stored: dict[str, tuple[object, str]] = {}
        #: steps of each optimizer since the mark
        self._made: Counter[int] = Counter()
        last = journal.last
        self._resume_point = None if last is None else last.commit.resume_point
        if self._resume_point is not None and self._resume_point.why_not:
            raise ComebackError(_LOST.format(why=self._resume_point.why_not))
        #: the state to return to; None in a first incarnation, and after the return
        self._target = (
            None
            if self._resume_point is None
            else WorkerState.from_bytes(self._resume_point.script)
        )
        #: steps of each optimizer that the servers have applied
        self._skipping = Counter({} if self._target is None else self._target.values["made"])
        #: False when all workers had dropped the last of them for an infinity
        self.has_applied = True
        #: False once the script reaches the loop in which the earlier incarnation was
        self.is_catching_up = self._target is not None

    def epoch_asked(self, loader: int) -> None:
        """The loader has its position since the script made it."""

    def attach(self, job: Job, served: Callable[[], Sequence[Tensor]]) -> None:
        self._job, self._served = job, served

    @property
    def job(self) -> Job:
        """The job of this worker."""
        assert self._job is not None, "the replay belongs to no job yet"
        return self._job

    @property
    def is_skipping(self) -> bool:
        """True while steps are skipped."""
        return bool(self._skipping)

    def position_of(self, loader: int) -> Position | None:
        """The position at which a loader begins; None: at its first record."""
        if self._target is None:
            return None
        positions = self._target.values["before"]
        return positions[loader] if loader < len(positions) else None

    def is_trained_on(self, loader: int) -> bool:
        """True for the loader whose batches the earlier incarnation trained on."""
        return self._target is not None and bool(self._target.values["loader"] == loader)

    def loop_begins(self, loader: int) -> None:
        """The script begins to iterate a loader."""
        if self._skipping and not self.is_catching_up and self.is_trained_on(loader):
            raise ComebackError(_DIFFERENT.format(step="has ended its loop without it"))
        if self.is_catching_up and self._target is not None and self._resume_point is not None:
            if loader != self._target.values["loader"]:
                self._calls_before.setdefault(loader, self._replies.made)
                return
            # the earlier incarnation had opened the job before its first step
            self.job.open()
            self.is_catching_up, self._is_stale = False, True
            self._replies.go_on(self._resume_point.replies, self._resume_point.meetings)
            self._calls_before[loader] = self._resume_point.prelude
            epoch, consumed = self.job.loaders[loader].epoch, self.job.loaders[loader].consumed
            logger.warning("restarted: resuming in epoch %d after %d samples", epoch, consumed)
        self._calls_before.setdefault(loader, self._replies.made)
        if self._mark is not None and self._mark.loader == loader:
            self._is_stale = True

    def hands_out(self, loader: int, before: Position) -> None:
        """A loader at position `before` is about to return a batch."""
        if not in_main_thread():
            # another thread reads ahead of the training
            self._mark = None
            return
        # an evaluation since the last step may have ended
        has_ended = self._mark and not self.job.loaders[self._mark.loader].cursor.is_being_read
        if self._is_stale or has_ended:
            positions: list[Position] = [one.cursor.resume_state() for one in self.job.loaders]
            positions[loader] = before
            self._mark = _BatchMark(loader, positions, self._replies.made, self._replies.meetings)
            self._is_stale = False
            self._made.clear()
            self._records.clear()
        self._records[loader] = _checksum(self.job.loaders[loader].source.records_after(before))

    def skip_step(self, optimizer: int) -> bool:
        """Count a step that the servers have applied; False where it must be made."""
        if not self._skipping[optimizer]:
            return False
        self._check_batch()
        self._skipping[optimizer] -= 1
        self._skipping += Counter()  # drops zeros
        self._made[optimizer] += 1
        if not self._skipping:
            self._is_stale = True
        return True

    def _check_batch(self) -> None:
        """ComebackError unless the skipped step has the batch of the step on the servers."""
        assert self._target is not None
        values = self._target.values
        before = {n: _place(values["loaders"][n], records) for n, records in values["hand"].items()}
        hand = self._current_records()
        now = {
            n: _place(self.job.loaders[n].cursor.resume_state(), records)
            for n, records in hand.items()
        }
        if now != before:
            step = _ANOTHER_BATCH.format(now=_described(now), before=_described(before))
            raise ComebackError(_DIFFERENT.format(step=step))

    def _current_records(self) -> dict[int, int]:
        """By loader that was read since the mark: checksum of the records in its batch."""
        return {
            number: self._records.get(number, 0)
            for number, loader in enumerate(self.job.loaders)
            if number in self._records or loader.cursor.is_being_read
        }

    def after_skip(self, optimizer: int) -> None:
        """Restore the state of the worker after the last skipped step."""
        if not self._skipping and self._target is not None:
            target, self._target = self._target, None
            self._restore(target)
            self._count(optimizer)

    def _count(self, optimizer: int) -> None:
        managed = self.job.served_optimizers()[optimizer]
        managed.count_on_servers((managed.steps_on_servers or 0) + self.has_applied)
        self.job.step += self.has_applied

    def _restore(self, target: WorkerState) -> None:
        """Restore the state at the step."""
        values = target.values
        load_replayed(self.job, values)
        with torch.no_grad():
            for name, tensor in self._unserved_tensors().items():
                if (kept := values["kept"].get(name)) is None:
                    assign(tensor, target.tensors[name])
                else:
                    assign(tensor, _from_bytes(tensor, self._journal.blobs.get(kept)))
        if target.rng is not None:
            checkpoint.set_rng_state(target.rng)

    def _unserved_tensors(self) -> dict[str, Tensor]:
        return self._unserved.tensors(
            [managed.module for managed in self.job.models], self._served()
        )

    def resume_point(self, optimizer: int) -> ResumePoint:
        """The state of this worker in the middle of a step, or why there is none."""
        mark = self._mark
        self._is_stale = True
        self._made[optimizer] += 1
        try:
            found = _unresumable(_NO_BATCH) if mark is None else self._resume_point_at(mark)
        except CheckpointError as error:
            # the state of a scheduler or of param groups may contain objects of the script
            logger.debug("a restart of this worker alone could not resume: %s", error)
            found = _unresumable(str(error))
        self._report(not found.why_not)
        return found

    def _resume_point_at(self, mark: _BatchMark) -> ResumePoint:
        number, own = self._journal.blobs.next_point(), self._unserved_tensors()
        kept = {n: self._kept(n, t) for n, t in own.items() if t.nbytes >= _LARGE}
        state = WorkerState(
            rank=self.job.group.index,
            rng=self._rng.state(),
            values={
                "loader": mark.loader,
                "before": mark.positions,
                "made": dict(self._made),
                "hand": self._current_records(),
                "kept": kept,
                **saved_values(self.job, Purpose.REPLAY),
            },
            tensors={name: tensor for name, tensor in own.items() if name not in kept},
        )
        return ResumePoint(
            mark.replies,
            mark.meetings,
            self._calls_before[mark.loader],
            state.to_bytes(),
            number=number,
            kept=list(kept.values()),
        )

    def _kept(self, name: str, tensor: Tensor) -> str:
        """The key of a large tensor in the blob store."""
        fingerprint, blobs = _fingerprint(tensor), self._journal.blobs
        known = self._stored.get(name)
        if known is None or known[0] != fingerprint or not blobs.keep(known[1]):
            known = self._stored[name] = fingerprint, blobs.put(_bytes(tensor))
        return known[1]

    def begin(self, communicator: Communicator) -> None:
        """Repeat the last logged step, and report that the worker may be restarted."""
        last = self._journal.last
        self.has_applied = last is None or communicator.repeat(last)
        # the first forward, inside the loop, may be the place where workers agree on the model
        made, meetings = self._replies.made, self._replies.meetings
        self._calls_before = dict.fromkeys(self._calls_before, made)
        if self._mark is not None:
            self._mark = dataclasses.replace(self._mark, replies=made, meetings=meetings)
        self._report(True)

    def forget_position(self) -> None:
        """Report no position until the next step."""
        self._mark, self._is_stale = None, True
        self._report(False)

    def disable(self, why: str) -> None:
        """Let no incarnation resume from the last step, after everything has arrived."""
        self.forget_position()
        if self._journal.has_committed:
            self._journal.give_up(why)

    def _report(self, restartable: bool) -> None:
        if restartable != self._is_restartable:
            self._is_restartable = restartable
            self._on_change(restartable)


def _unresumable(why: str) -> ResumePoint:
    return ResumePoint(0, 0, 0, b"", why_not=why)


def _checksum(records: Sequence[Any] | None) -> int:
    """A checksum of records; zero for those of a stream."""
    return 0 if records is None else zlib.crc32(repr(list(records)).encode())


def _place(position: Position, records: int) -> tuple[int, int, int]:
    return int(position["epoch"]), int(position["consumed"]), records


def _described(places: Mapping[int, tuple[int, int, int]]) -> str:
    return " and ".join(
        f"the batch of loader {number} before sample {consumed} of epoch {epoch} "
        f"(records {records:08x})"
        for number, (epoch, consumed, records) in sorted(places.items())
    )


def _fingerprint(tensor: Tensor) -> object:
    """Equal for a tensor that has not changed; cheap for a tensor of any size."""
    # an odd stride reaches all columns
    some = tensor.reshape(-1)[:: tensor.numel() // _SAMPLED | 1]
    return tensor.data_ptr(), version(tensor), _bytes(some).tobytes()


def _bytes(tensor: Tensor) -> NDArray[np.uint8]:
    """The bytes of a tensor, in order."""
    flat = tensor.detach().to("cpu").contiguous().reshape(-1)
    found: NDArray[np.uint8] = flat.view(torch.uint8).numpy()
    return found


def _from_bytes(tensor: Tensor, data: bytes) -> Tensor:
    """A tensor of the type and shape of another, from bytes."""
    return torch.frombuffer(bytearray(data), dtype=tensor.dtype).view(tensor.shape)


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
