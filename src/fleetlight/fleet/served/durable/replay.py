# SPDX-License-Identifier: Apache-2.0
"""`WorkerReplay`: how a worker that was started again comes to where it was when it died.

The script runs from its beginning. The loader that it trains on hands out the batch of the last
step once more; that step is passed over, since the servers have it, and then everything is as it
was behind it: what comes after a step in the loop is done again, and all else goes on.
"""

from __future__ import annotations

import dataclasses
import threading
import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

import fleetlight.checkpoint as checkpoint
from fleetlight.checkpoint import WorkerState
from fleetlight.checkpoint.state.rng import RngStateCache
from fleetlight.errors import CheckpointError, ComebackError
from fleetlight.fleet.checkpoints.worker_state import parts, saved_values
from fleetlight.fleet.job import Job
from fleetlight.fleet.protocols import NoReplay, Purpose, Replay, SavedPart
from fleetlight.fleet.served.durable.unserved_tensors import UnservedTensors
from fleetlight.observe.log import logger
from fleetlight.ps.worker.replay.commit_log import ResumePoint
from fleetlight.ps.worker.replay.worker_journal import WorkerJournal
from fleetlight.torch_compat.tensors import assign, version

Position = Mapping[str, Any]

#: bytes of a tensor that is written down only when it has changed
_LARGE = 1 << 16
#: elements of it that are looked at, since `.data` and NumPy change it behind torch's back
_SAMPLED = 1 << 10

_ELSEWHERE = (
    "this worker was started again, and the step that its life before made last, which the servers "
    "have, is to be left out; but the script {step}. It must be the same script with the same data "
    "in each life, and what it decides must not depend on anything that is another one in a later "
    "life, such as the time, or random numbers that decide which batches are trained on: start all "
    "processes again, with --resume only if all is as it was"
)
_LOST = (
    "this worker was started again alone, but cannot go on where its life before was: {why}; start "
    "all processes again, as fleetrun does with --max_restarts"
)
_NO_BATCH = (
    "its last step was made with a batch that no loader of fleet.shard has handed out to the "
    "thread that trains"
)
_ANOTHER = "comes to a step with {now}, where it was made with {before}"


@dataclasses.dataclass(frozen=True)
class _BatchMark:
    """Where the first batch since the last step was handed out."""

    #: number of the loader, and where all of them were
    loader: int
    positions: list[Position]
    answers: int
    meetings: int


class StepReplay(Replay, Protocol):
    """What sessions and steps tell the replay of their worker."""

    #: False when the last of the steps passed over was skipped by all for an infinity
    has_applied: bool

    @property
    def is_passing(self) -> bool:
        """True as long as steps are passed over."""

    def attach(self, job: Job, served: Callable[[], Sequence[Tensor]]) -> None:
        """From now on it is that of a job; `served` are the tensors that its servers keep."""

    def begin(self) -> None:
        """Nothing is pushed yet: another life may begin anew."""

    def passes(self, optimizer: int) -> bool:
        """True for a step that the servers have already: to be left out."""

    def passed(self, optimizer: int) -> None:
        """After a step that was left out."""

    def moment(self, optimizer: int) -> ResumePoint | None:
        """Where this worker is, in the middle of a step."""


class NoStepReplay(NoReplay):
    """The replay of a worker that keeps nothing of itself."""

    has_applied = True
    is_passing = False

    def attach(self, job: Job, served: Callable[[], Sequence[Tensor]]) -> None:
        """Nothing is kept."""

    def begin(self) -> None:
        """Nothing is kept."""

    def passes(self, optimizer: int) -> bool:
        """No step is passed over."""
        return False

    def passed(self, optimizer: int) -> None:
        """No step is passed over."""

    def moment(self, optimizer: int) -> None:
        """Nothing is kept."""


class WorkerReplay:
    """Used by the thread that trains."""

    def __init__(self, redo: WorkerJournal, tell: Callable[[bool], None]) -> None:
        """`tell` is told whether this worker may be started again alone, when that changes."""
        self._redo, self._answers = redo, redo.answers
        self._tell = tell
        self._job: Job | None = None
        self._served: Callable[[], Sequence[Tensor]] = lambda: ()
        self._returns = False
        self._rng = RngStateCache()
        self._own = UnservedTensors()
        self._mark: _BatchMark | None = None
        #: a step was made since the mark
        self._is_stale = True
        #: by loader: calls made before its first batch
        self._preludes: dict[int, int] = {}
        #: by loader: which records its last batch since the mark has, as a checksum
        self._hand: dict[int, int] = {}
        #: by name: the signs of a large tensor, and what it is called on the shelf
        self._known: dict[str, tuple[object, str]] = {}
        #: steps of each optimizer since the mark
        self._made: Counter[int] = Counter()
        last = redo.last
        self._moment = None if last is None else last.commit.moment
        if self._moment is not None and self._moment.why_not:
            raise ComebackError(_LOST.format(why=self._moment.why_not))
        self._there = None if self._moment is None else WorkerState.from_bytes(self._moment.script)
        #: steps of each optimizer that the servers have
        self._passing = Counter({} if self._there is None else self._there.values["made"])
        #: False when the last of them was skipped by all for an infinity
        self.has_applied = True
        #: False once the script has come to the loop in which the life before it was
        self.is_catching_up = self._there is not None

    #: a later life of this worker resumes where this one stops
    keeps = True

    def attach(self, job: Job, served: Callable[[], Sequence[Tensor]]) -> None:
        """As in `StepReplay`."""
        self._job, self._served = job, served

    @property
    def job(self) -> Job:
        """The job of this worker."""
        assert self._job is not None, "the replay is of no job yet"
        return self._job

    @property
    def is_passing(self) -> bool:
        """True as long as steps are passed over."""
        return bool(self._passing)

    def position_of(self, loader: int) -> Position | None:
        """Where a loader is to begin; None: at its beginning."""
        if self._there is None:
            return None
        positions = self._there.values["before"]
        return positions[loader] if loader < len(positions) else None

    def is_trained_on(self, loader: int) -> bool:
        """True for the loader whose batches the life before made its steps with."""
        return self._there is not None and bool(self._there.values["loader"] == loader)

    def begins(self, loader: int) -> None:
        """The script begins to iterate a loader."""
        if self._passing and not self.is_catching_up and self.is_trained_on(loader):
            raise ComebackError(_ELSEWHERE.format(step="has ended its loop without it"))
        if self.is_catching_up and self._there is not None and self._moment is not None:
            if loader != self._there.values["loader"]:
                self._preludes.setdefault(loader, self._answers.made)
                return
            # what the life before has called for that came before its first step
            self.job.open()
            self.is_catching_up, self._is_stale = False, True
            self._answers.go_on(self._moment.answers, self._moment.meetings)
            self._preludes[loader] = self._moment.prelude
            epoch, consumed = self.job.loaders[loader].epoch, self.job.loaders[loader].consumed
            logger.warning(
                "started again; goes on in epoch %d, %d samples into it", epoch, consumed
            )
        self._preludes.setdefault(loader, self._answers.made)
        if self._mark is not None and self._mark.loader == loader:
            self._is_stale = True

    def hands_out(self, loader: int, before: Position) -> None:
        """A loader that was there is about to hand out a batch."""
        if threading.current_thread() is not threading.main_thread():
            # it is read ahead of the training
            self._mark = None
            return
        # an evaluation since the last step, which is read no more, is behind the worker
        has_ended = self._mark and not self.job.loaders[self._mark.loader].cursor.is_being_read
        if self._is_stale or has_ended:
            positions: list[Position] = [one.cursor.resume_state() for one in self.job.loaders]
            positions[loader] = before
            self._mark = _BatchMark(loader, positions, self._answers.made, self._answers.meetings)
            self._is_stale = False
            self._made.clear()
            self._hand.clear()
        self._hand[loader] = _checksum(self.job.loaders[loader].source.records_after(before))

    def passes(self, optimizer: int) -> bool:
        """True for a step that the servers have already: to be left out."""
        if not self._passing[optimizer]:
            return False
        self._check_batch()
        self._passing[optimizer] -= 1
        self._passing += Counter()  # without those that are zero
        self._made[optimizer] += 1
        if not self._passing:
            self._is_stale = True
        return True

    def _check_batch(self) -> None:
        """What is left out must be the step that the servers have, and not another one."""
        assert self._there is not None
        values = self._there.values
        before = {n: _place(values["loaders"][n], records) for n, records in values["hand"].items()}
        hand = self._in_hand()
        now = {
            n: _place(self.job.loaders[n].cursor.resume_state(), records)
            for n, records in hand.items()
        }
        if now != before:
            told = _ANOTHER.format(now=_told(now), before=_told(before))
            raise ComebackError(_ELSEWHERE.format(step=told))

    def _in_hand(self) -> dict[int, int]:
        """By loader that is being read, or was since the mark: which records its batch has."""
        return {
            number: self._hand.get(number, 0)
            for number, loader in enumerate(self.job.loaders)
            if number in self._hand or loader.cursor.is_being_read
        }

    def passed(self, optimizer: int) -> None:
        """Behind a step that was left out: behind the last one, all is as it was."""
        if not self._passing and self._there is not None:
            there, self._there = self._there, None
            self._put(there)
            self._count(optimizer)

    def _count(self, optimizer: int) -> None:
        plan = self.job.served_steps()[optimizer]
        plan.count_on_servers((plan.steps_on_servers or 0) + self.has_applied)
        self.job.step += self.has_applied

    def _put(self, there: WorkerState) -> None:
        """All as it was when the step was made."""
        values = there.values
        for part in parts(self.job, Purpose.REPLAY):
            value = values.get(part.name)
            part.load(
                SavedPart(
                    purpose=Purpose.REPLAY,
                    step=values["step"],
                    first=value,
                    own=value,
                    each=[value],
                )
            )
        with torch.no_grad():
            for name, tensor in self._own_tensors().items():
                if (kept := values["kept"].get(name)) is None:
                    assign(tensor, there.tensors[name])
                else:
                    assign(tensor, _like(tensor, self._redo.shelf.get(kept)))
        if there.rng is not None:
            checkpoint.set_rng_state(there.rng)

    def _own_tensors(self) -> dict[str, Tensor]:
        return self._own.tensors([plan.module for plan in self.job.models], self._served())

    def moment(self, optimizer: int) -> ResumePoint:
        """Where this worker is, in the middle of a step, or why nothing tells."""
        mark = self._mark
        self._is_stale = True
        self._made[optimizer] += 1
        try:
            found = _none(_NO_BATCH) if mark is None else self._moment_at(mark)
        except CheckpointError as error:
            # of a scheduler, or of param groups, that hold something of the script's own
            logger.debug("this worker could not go on alone: %s", error)
            found = _none(str(error))
        self._say(not found.why_not)
        return found

    def _moment_at(self, mark: _BatchMark) -> ResumePoint:
        number, own = self._redo.shelf.next_moment(), self._own_tensors()
        kept = {n: self._kept(n, t) for n, t in own.items() if t.nbytes >= _LARGE}
        state = WorkerState(
            rank=self.job.group.index,
            rng=self._rng.state(),
            values={
                "loader": mark.loader,
                "before": mark.positions,
                "made": dict(self._made),
                "hand": self._in_hand(),
                "kept": kept,
                **saved_values(self.job, Purpose.REPLAY),
            },
            tensors={name: tensor for name, tensor in own.items() if name not in kept},
        )
        return ResumePoint(
            mark.answers,
            mark.meetings,
            self._preludes[mark.loader],
            state.to_bytes(),
            number=number,
            kept=list(kept.values()),
        )

    def _kept(self, name: str, tensor: Tensor) -> str:
        """What a large tensor is called on the shelf."""
        signs, shelf = _signs(tensor), self._redo.shelf
        known = self._known.get(name)
        if known is None or known[0] != signs or not shelf.keep(known[1]):
            known = self._known[name] = signs, shelf.put(_bytes(tensor))
        return known[1]

    def begin(self) -> None:
        """Nothing is pushed yet: another life may begin anew."""
        # a script may leave it to the first forward to agree on the model, amid its loop
        made, meetings = self._answers.made, self._answers.meetings
        self._preludes = dict.fromkeys(self._preludes, made)
        if self._mark is not None:
            self._mark = dataclasses.replace(self._mark, answers=made, meetings=meetings)
        self._say(True)

    def lose(self) -> None:
        """Where the worker is from now on, only its next step tells."""
        self._mark, self._is_stale = None, True
        self._say(False)

    def give_up(self, why: str) -> None:
        """The same, where nothing is on its way any more; a life that has made no step is none."""
        self.lose()
        if self._redo.has_committed:
            self._redo.give_up(why)

    def _say(self, returns: bool) -> None:
        if returns != self._returns:
            self._returns = returns
            self._tell(returns)


def _none(why: str) -> ResumePoint:
    return ResumePoint(0, 0, 0, b"", why_not=why)


def _checksum(records: Sequence[Any] | None) -> int:
    """Alike for the same records; nothing is known of those of a stream."""
    return 0 if records is None else zlib.crc32(repr(list(records)).encode())


def _place(position: Position, records: int) -> tuple[int, int, int]:
    return int(position["epoch"]), int(position["consumed"]), records


def _told(places: Mapping[int, tuple[int, int, int]]) -> str:
    return " and ".join(
        f"the batch of loader {number} before sample {consumed} of epoch {epoch} "
        f"(records {records:08x})"
        for number, (epoch, consumed, records) in sorted(places.items())
    )


def _signs(tensor: Tensor) -> object:
    """Alike for a tensor that has not changed, at little cost however large it is."""
    # an odd step comes by all columns
    some = tensor.reshape(-1)[:: tensor.numel() // _SAMPLED | 1]
    return tensor.data_ptr(), version(tensor), _bytes(some).tobytes()


def _bytes(tensor: Tensor) -> NDArray[np.uint8]:
    """All of a tensor as it lies in memory, in order."""
    flat = tensor.detach().to("cpu").contiguous().reshape(-1)
    found: NDArray[np.uint8] = flat.view(torch.uint8).numpy()
    return found


def _like(tensor: Tensor, data: bytes) -> Tensor:
    """The way back."""
    return torch.frombuffer(bytearray(data), dtype=tensor.dtype).view(tensor.shape)
