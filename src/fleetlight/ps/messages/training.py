# SPDX-License-Identifier: Apache-2.0
"""Pulls of values, and pushes of gradients and differences."""

from __future__ import annotations

import time
from typing import Annotated, Any, ClassVar

import msgspec

from fleetlight.ps.messages.base import MessageBase
from fleetlight.wire.control_signals import NO_SIGNAL, ControlSignal


class Fill(MessageBase, frozen=True):
    """Worker 0's first values. Arrays: ids, rows of each table in `tables`; then D if `dense`."""

    repeatable: ClassVar[bool] = True
    tables: list[int]
    dense: bool
    #: the values come from a checkpoint and replace those on the server
    loaded: bool = False
    #: first reset all other rows of these tables to their first values
    reset: bool = False


class TablePull(msgspec.Struct, frozen=True):
    """Rows requested from one table."""

    table: int
    #: False: an unknown id reads its first value and inserts no row
    insert: bool


class Pull(MessageBase, frozen=True):
    """Read rows, dense values or both. Arrays: ids of each table. Reply: Pulled."""

    repeatable: ClassVar[bool] = True
    tables: list[TablePull]
    dense: bool
    #: wait until this many steps of every worker in this phase are applied
    at_least: int = 0
    #: number of barriers that the worker has passed
    phase: int = 0
    #: the worker's step, for admission by probability
    step: int = 0
    #: prefetch: the reply to the worker's next push returns the rows of these ids that it changed
    ahead: bool = False
    #: the worker's number of the prefetched batch
    batch: int = 0
    #: the rows will be read soon, so the disk may begin; the reply has none
    soon: bool = False


class Pulled(MessageBase, frozen=True):
    """Arrays: rows of each requested table; then D if requested."""

    #: pushes applied on this server so far
    version: int
    #: steps of the slowest worker applied in this phase
    slowest: int


class TablePush(msgspec.Struct, frozen=True):
    """Gradients of one table. Its arrays: ids, gradients; and shows, clicks if `counted`."""

    table: int
    counted: bool = False


class Push(MessageBase, frozen=True):
    """Gradients of one optimizer's step.

    Arrays: those of each table; its D if `dense`; the ids of each table in `ahead`.
    Reply: Pushed; in sync mode after the pushes of all workers for that step are applied.
    """

    repeatable: ClassVar[bool] = True
    #: number of the worker's push to this server; a repeated number is not applied again
    sequence: int
    epoch: int
    optimizer: int
    #: the worker's step, from 0: the bias correction of Adam uses step + 1
    step: int
    #: number of barriers that the worker has passed
    phase: int
    #: hyper-parameters of each param group when the gradients were computed
    options: list[dict[str, Any]]
    tables: list[TablePush]
    dense: bool
    #: dense parameters of the optimizer without a gradient
    absent: list[int] = msgspec.field(default_factory=list)
    #: the loss scaler found an infinity: skip the step
    skip: bool = False
    #: the error with which the step fails for all workers; the push then has no gradients
    refusal: str = ""
    #: return dense values in the reply
    wants_dense: bool = True
    #: hold the gradients until Apply; return the square of their norm
    hold: bool = False
    #: number of steps merged into this push
    merged: Annotated[int, msgspec.Meta(ge=1, le=1 << 32)] = 1
    #: `version` of the values that the gradients were computed with
    seen: int = 0
    #: tables of the optimizer, for a later batch: the reply has rows of these ids
    ahead: list[int] = msgspec.field(default_factory=list)
    #: sync: tables of the optimizer; the reply has the ids that other workers changed
    reports: list[int] = msgspec.field(default_factory=list)


class Apply(MessageBase, frozen=True):
    """Apply the held gradients times a factor. Arrays: ids of each in `ahead`. Reply: Pushed."""

    repeatable: ClassVar[bool] = True
    sequence: int
    epoch: int
    optimizer: int
    step: int
    phase: int
    factor: float
    options: list[dict[str, Any]]
    skip: bool = False
    wants_dense: bool = True
    ahead: list[int] = msgspec.field(default_factory=list)
    reports: list[int] = msgspec.field(default_factory=list)


class Pushed(MessageBase, frozen=True):
    """Arrays: rows of each table in `ahead`; D (of all optimizers) if requested; changed rows; ids.

    Changed rows are positions and rows for each of `changed`: tables with prefetched rows that this
    step changed. Positions index the ids of the prefetched batch, whose number is in `batches`.
    Ids are those of each table in `outdated` that other workers changed in this step.
    """

    version: int
    slowest: int
    applied: bool = True
    #: the square of the norm of held gradients on this server
    square: float = 0.0
    changed: list[int] = msgspec.field(default_factory=list)
    batches: list[int] = msgspec.field(default_factory=list)
    #: the tables of `reports`, unless this server does not know which rows changed
    outdated: list[int] = msgspec.field(default_factory=list)
    #: sync: what all workers of this step do after it; otherwise the signals so far
    call: ControlSignal = NO_SIGNAL


class GeoExchange(MessageBase, frozen=True):
    """GeoSGD differences, which the server adds. Reply: GeoExchangeReply.

    Arrays: ids, differences of each table; then D differences if `dense`.
    """

    repeatable: ClassVar[bool] = True
    sequence: int
    epoch: int
    step: int
    tables: list[int]
    dense: bool
    #: False for the last differences: the reply has no values
    wants: bool = True
    #: another chunk of the same exchange follows
    more: bool = False


class GeoExchangeReply(MessageBase, frozen=True):
    """Arrays: the current rows of each requested table; then D if requested."""

    version: int
    slowest: int
    #: the control signals so far
    call: ControlSignal = NO_SIGNAL


class EndPhase(MessageBase, frozen=True):
    """The worker makes no further step before the next barrier. Reply: Done."""

    repeatable: ClassVar[bool] = True
    phase: int


class Shrink(MessageBase, frozen=True):
    """Decay the counts of a table by one day and remove rows. Reply: Shrunk."""

    repeatable: ClassVar[bool] = True
    table: int
    unseen_days: int
    score: float
    decay: float
    #: number of the worker's call; a repeated number is not executed again; 0: not numbered
    number: int = 0


class Shrunk(MessageBase, frozen=True):
    """The number of rows removed and left."""

    removed: int
    left: int


class FiguresRequest(MessageBase, frozen=True):
    """Request the counters of a server. Reply: ServerFigures."""

    repeatable: ClassVar[bool] = True


class ServerFigures(MessageBase, frozen=True):
    """Counters of one server."""

    pushes: int
    rows: dict[str, int]
    nbytes: dict[str, int]
    #: histogram of staleness: pushes applied between the pull and the push of a gradient -> times
    staleness: dict[int, int]
    #: of the journal and the snapshots, by the names of the catalogue
    durable: dict[str, float] = msgspec.field(default_factory=dict)
    #: what the clock of the server shows, in nanoseconds since 1970
    clock_ns: int = msgspec.field(default_factory=time.time_ns)
