# SPDX-License-Identifier: Apache-2.0
"""Changes of a server's state, as its journal records them. Pure data: arrays travel separately.

A server applies a change and replays it with the same functions. Each class lists its arrays in
order; D are the dense blocks of that server.
"""

from __future__ import annotations

from typing import Any

import msgspec

from fleetlight.ps.high_water_marks import Mark
from fleetlight.ps.messages import Fill, LeaseProgress, LeaseRequest, Shrink, TablePush
from fleetlight.wire.control_signals import NO_SIGNAL, ControlSignal


class WorkerPart(msgspec.Struct, frozen=True, array_like=True):
    """The push of one worker in a change."""

    worker: int
    started_at: int
    sequence: int
    phase: int = 0
    #: steps merged into this push
    merged: int = 1
    #: the version of the values that its gradients were computed with; None without gradients
    seen: int | None = None
    #: the worker's step counter
    step: int = 0


class _Change(msgspec.Struct, frozen=True, tag=True):
    pass


class StepApplied(_Change, frozen=True):
    """The gradients of one optimizer's step, of one worker or the mean of all. Arrays: as Push.

    A skipped step has no gradients; it only advances the workers.
    """

    optimizer: int
    step: int
    options: list[dict[str, Any]]
    entries: list[WorkerPart]
    tables: list[TablePush] = []
    dense: bool = False
    absent: list[int] = []
    skipped: bool = False
    #: the control signal in the replies; a repeated request must receive the same signal
    call: ControlSignal = NO_SIGNAL


class StepHeld(_Change, frozen=True):
    """The mean gradients of a step that waits for its clip factor. Arrays: as Push.

    A step that will be skipped has no gradients.
    """

    optimizer: int
    step: int
    entries: list[WorkerPart]
    square: float
    tables: list[TablePush] = []
    dense: bool = False
    absent: list[int] = []
    skipped: bool = False
    #: why the gradients must not be applied; empty if they may
    refusal: str = ""
    #: True when an earlier file has this record too, so its pushes are already counted
    restated: bool = False


class HeldStepApplied(_Change, frozen=True):
    """The server applies held gradients times a factor, or skips them."""

    optimizer: int
    step: int
    options: list[dict[str, Any]]
    entries: list[WorkerPart]
    factor: float
    skipped: bool = False
    #: as in `StepApplied`
    call: ControlSignal = NO_SIGNAL


class DifferencesAdded(_Change, frozen=True):
    """GeoSGD differences. Arrays: ids, differences of each table; then D differences if `dense`."""

    entry: WorkerPart
    step: int
    tables: list[int]
    dense: bool
    #: another chunk of the same exchange follows
    more: bool = False


class RowsSeen(_Change, frozen=True):
    """Training read these ids at that step, which inserts their rows. Arrays: ids."""

    table: int
    step: int


class PhaseEnded(_Change, frozen=True):
    """The worker makes no further step before the next barrier."""

    worker: int
    phase: int


class WorkerLeft(_Change, frozen=True):
    """A worker has left the job, or was lost."""

    worker: int
    started_at: int
    #: True for a worker that was lost without a goodbye; it cannot rejoin
    lost: bool = False


class WorkerJoined(_Change, frozen=True):
    """A worker joined or restarted; the server refuses requests of its earlier incarnations."""

    worker: int
    started_at: int
    incarnation: int


class WorkerEntered(_Change, frozen=True):
    """A worker takes part in a running job from this phase on, in the place of one that left."""

    worker: int
    started_at: int
    phase: int


class WorkerEnteredAll(_Change, frozen=True):
    """All servers know the worker that has entered."""

    worker: int


class TurnCut(_Change, frozen=True):
    """The newest pass over a loader ends early, and its free records are the next pass."""

    loader: int


class BarrierPassed(_Change, frozen=True):
    """All workers reached a barrier. Arrays: the bytes of every worker, in worker order."""

    meeting: int
    operation: str
    #: the number of arrays of each worker
    counts: list[int]
    #: it came before the first lease of the job
    is_prelude: bool = False


class LeaseChanged(_Change, frozen=True):
    """A worker requested a lease or reported its progress."""

    worker: int
    message: LeaseRequest | LeaseProgress


class LedgerState(msgspec.Struct, frozen=True):
    """Progress and staleness of the workers, and the high-water marks of their pushes."""

    epoch: int
    marks: list[Mark]
    #: by worker: the phase of its last push, and its steps in that phase
    applied: dict[int, tuple[int, int]]
    #: by worker that has not left: the last phase it ended
    ended: dict[int, int]
    version: int
    staleness: dict[int, int]
    #: the workers whose last push changed nothing
    skipped: list[int] = []
    #: the control signals sent with step replies so far
    call: ControlSignal = NO_SIGNAL


class StepsState(msgspec.Struct, frozen=True):
    """The step and phase that each worker may push next."""

    ended: dict[int, int]
    #: optimizer, worker, phase, pushes in it, step, whether the last push may be repeated
    positions: list[tuple[int, int, int, int, int, bool]]


class LeaseState(msgspec.Struct, frozen=True, array_like=True):
    """The ranges leased to a worker in one pass, and its progress."""

    worker: int
    ranges: list[tuple[int, int]]
    reached: tuple[int, int]


class RoundState(msgspec.Struct, frozen=True):
    """One pass over a loader by all workers."""

    loader: int
    turn: int
    epoch: int
    whole: list[tuple[int, int]]
    free: list[tuple[int, int]]
    leases: list[LeaseState]
    #: the queue leases out no more of it; once it is over, the records of the next pass
    is_cut: bool = False
    left: list[tuple[int, int]] = []


class ShardQueueState(msgspec.Struct, frozen=True):
    """Which records are free, leased or done."""

    turns: list[RoundState] = []
    #: by loader: its last pass
    newest: dict[int, int] = {}
    #: loader, worker, the first pass that the worker may still request
    backs: list[tuple[int, int, int]] = []
    #: the workers that have left, and places without a worker
    gone: list[int] = []
    #: workers that take part in a running job, but are not known to all servers
    entering: list[int] = []


class Baseline(_Change, frozen=True):
    """All state except rows, before the next change. Arrays: D; then those of `state`.

    It is the first record of each file; with a snapshot of the rows, replay can start there.
    """

    ledger: LedgerState
    steps: StepsState
    releases: StepsState
    #: workers that left: worker, its first start, and whether it was lost
    gone: list[tuple[int, int, bool]]
    #: True when first values or a checkpoint are loaded; the server then ignores first values
    has_values: bool
    state: list[tuple[int, str, str]]
    scalars: list[dict[str, bool | int | float | None]]
    work: ShardQueueState = ShardQueueState()
    #: shrunk tables: table, number of the last call, rows removed, rows left
    shrunk: list[tuple[int, int, int, int]] = []
    #: all workers that ever joined: worker, its first start, its newest incarnation
    arrivals: list[tuple[int, int, int]] = []
    #: those of them that join a running job, and take part in nothing yet
    joining: list[int] = []


Change = (
    StepApplied | StepHeld | HeldStepApplied | DifferencesAdded | Fill | RowsSeen | Shrink
    | PhaseEnded | WorkerLeft | BarrierPassed | LeaseChanged | WorkerJoined | Baseline
    | WorkerEntered | WorkerEnteredAll | TurnCut
)  # fmt: skip
