# SPDX-License-Identifier: Apache-2.0
"""What happens to a server's values, one change after another. Pure data: arrays travel beside.

A change is carried out alike whether it has just come or is read back from a journal. Each class
says which arrays go with it, in order; D are the dense blocks on that server.
"""

from __future__ import annotations

from typing import Any

import msgspec

from fleetlight.ps.high_water_marks import Mark
from fleetlight.ps.messages import Fill, LeaseProgress, LeaseRequest, Shrink, TablePush
from fleetlight.ps.messages.base import NO_SIGNAL, ControlSignal


class WorkerPart(msgspec.Struct, frozen=True, array_like=True):
    """A worker's part of a change."""

    worker: int
    incarnation: int
    sequence: int
    phase: int = 0
    #: steps that were merged into it
    merged: int = 1
    #: the version that its gradients were made with; None where that has no meaning
    seen: int | None = None
    #: the worker's step counter
    step: int = 0


class _Change(msgspec.Struct, frozen=True, tag=True):
    pass


class StepApplied(_Change, frozen=True, tag="Stepped"):
    """The gradients of one optimizer's step, of one worker or the mean of all. Arrays: as Push.

    Without gradients where the step was skipped: then the workers are further, and nothing else.
    """

    optimizer: int
    step: int
    options: list[dict[str, Any]]
    entries: list[WorkerPart]
    tables: list[TablePush] = []
    dense: bool = False
    absent: list[int] = []
    skipped: bool = False
    #: what all workers are to do behind it: who asks again must hear the same
    call: ControlSignal = NO_SIGNAL


class StepHeld(_Change, frozen=True, tag="Held"):
    """The mean gradients of a step that waits for a factor. Arrays: as Push.

    Without gradients where it will be skipped.
    """

    optimizer: int
    step: int
    entries: list[WorkerPart]
    square: float
    tables: list[TablePush] = []
    dense: bool = False
    absent: list[int] = []
    skipped: bool = False
    #: why the gradients must not be applied, if they must not
    refusal: str = ""
    #: it stands in an earlier file as well: its pushes are counted
    restated: bool = False


class HeldStepApplied(_Change, frozen=True, tag="Released"):
    """What was held is applied times a factor, or skipped."""

    optimizer: int
    step: int
    options: list[dict[str, Any]]
    entries: list[WorkerPart]
    factor: float
    skipped: bool = False
    #: as in `StepApplied`
    call: ControlSignal = NO_SIGNAL


class DifferencesAdded(_Change, frozen=True, tag="Differed"):
    """GeoSGD. Arrays: ids, differences of each table; then D differences if `dense`."""

    entry: WorkerPart
    step: int
    tables: list[int]
    dense: bool
    #: another piece of the same exchange follows
    more: bool = False


class RowsSeen(_Change, frozen=True, tag="Sighted"):
    """Ids were read in training, at that step; they have rows from now on. Arrays: ids."""

    table: int
    step: int


class PhaseEnded(_Change, frozen=True, tag="EndedPhase"):
    """The worker makes no more step before the coming barrier."""

    worker: int
    phase: int


class WorkerLeft(_Change, frozen=True, tag="Went"):
    """A worker has left for good, or was lost."""

    worker: int
    incarnation: int
    #: it said no goodbye, and is not taken in again
    lost: bool = False


class WorkerJoined(_Change, frozen=True, tag="Came"):
    """A worker has come, or was started again: nothing of an earlier life is taken any more."""

    worker: int
    incarnation: int
    life: int


class BarrierPassed(_Change, frozen=True, tag="Met"):
    """All workers have met. Arrays: the bytes of every worker, in their order."""

    meeting: int
    operation: str
    #: how many arrays are each worker's
    counts: list[int]


class LeaseChanged(_Change, frozen=True, tag="Asked"):
    """A worker was dealt records, or has said what it has done."""

    worker: int
    message: LeaseRequest | LeaseProgress


class LeasesFreed(_Change, frozen=True, tag="Freed"):
    """A worker leaves or is lost, and what it had in hand is others'."""

    worker: int


class LedgerState(msgspec.Struct, frozen=True):
    """How far the workers are, how old their gradients were, which pushes came."""

    epoch: int
    marks: list[Mark]
    #: by worker: the phase in which it pushed last, and its steps in that phase
    applied: dict[int, tuple[int, int]]
    #: by worker that has not left: the last phase it has ended
    ended: dict[int, int]
    version: int
    staleness: dict[int, int]
    #: the workers whose last push changed nothing
    skipped: list[int] = []
    #: what all have been told to do behind their steps
    call: ControlSignal = NO_SIGNAL


class StepsState(msgspec.Struct, frozen=True):
    """Who may bring what to which step next."""

    ended: dict[int, int]
    #: optimizer, worker, phase, pushes in it, step, whether the last may come again
    positions: list[tuple[int, int, int, int, int, bool]]


class LeaseState(msgspec.Struct, frozen=True, array_like=True):
    """What a worker was dealt in a turn, and what it has done of it."""

    worker: int
    dealt: list[tuple[int, int]]
    reached: tuple[int, int]


class RoundState(msgspec.Struct, frozen=True):
    """One iteration of a loader by all workers."""

    loader: int
    turn: int
    epoch: int
    whole: list[tuple[int, int]]
    free: list[tuple[int, int]]
    hands: list[LeaseState]


class ShardQueueState(msgspec.Struct, frozen=True):
    """Which records are free, in whose hands, or done."""

    turns: list[RoundState] = []
    #: by loader: its last turn
    newest: dict[int, int] = {}
    #: loader, worker, the first turn that it may still ask for
    backs: list[tuple[int, int, int]] = []
    #: the workers that do no more
    gone: list[int] = []


class Baseline(_Change, frozen=True, tag="Standing"):
    """Everything but rows, as it is before the next change. Arrays: D; then those of `state`.

    The first record of each file; with a snapshot of the rows, one may begin there.
    """

    ledger: LedgerState
    steps: StepsState
    releases: StepsState
    #: who has left: worker, incarnation, and whether it was lost
    gone: list[tuple[int, int, bool]]
    #: first values or a checkpoint's are here: first values are not wanted any more
    has_values: bool
    state: list[tuple[int, str, str]]
    scalars: list[dict[str, bool | int | float | None]]
    work: ShardQueueState = ShardQueueState()
    #: of tables that were shrunk: table, number of the last call, rows that went and were left
    shrunk: list[tuple[int, int, int, int]] = []
    #: who has ever come: worker, incarnation, its newest life
    lives: list[tuple[int, int, int]] = []


Change = (
    StepApplied | StepHeld | HeldStepApplied | DifferencesAdded | Fill | RowsSeen | Shrink
    | PhaseEnded | WorkerLeft | BarrierPassed | LeaseChanged | LeasesFreed | WorkerJoined | Baseline
)  # fmt: skip
