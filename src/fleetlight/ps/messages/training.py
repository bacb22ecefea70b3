# SPDX-License-Identifier: Apache-2.0
"""Values that workers read, and gradients and differences that they bring."""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec

from fleetlight.ps.messages.base import NO_SIGNAL, ControlSignal, MessageBase


class Fill(MessageBase, frozen=True):
    """Worker 0's first values. Arrays: ids, rows of each table in `tables`; then D if `dense`."""

    repeatable: ClassVar[bool] = True
    tables: list[int]
    dense: bool
    #: the values are a checkpoint's: they count more than those that are there
    loaded: bool = False
    #: of these tables, rows of all other ids go back to their first values before
    reset: bool = False


class TablePull(msgspec.Struct, frozen=True):
    """The rows wanted of one table."""

    table: int
    #: False: an unknown id reads its first value and leaves no row behind
    insert: bool


class Pull(MessageBase, frozen=True):
    """Rows, dense values or both. Arrays: ids of each table. Answer: Pulled."""

    repeatable: ClassVar[bool] = True
    tables: list[TablePull]
    dense: bool
    #: wait until every worker has had this many steps applied since the phase began
    at_least: int = 0
    #: counts the barriers the worker has passed
    phase: int = 0
    #: the worker's step, for admission by chance
    step: int = 0
    #: keep the ids until the worker's next push, whose answer brings the rows changed meanwhile
    ahead: bool = False
    #: the worker's number for the ids kept ahead: the answer says which list it speaks of
    batch: int = 0


class Pulled(MessageBase, frozen=True):
    """Arrays: rows of each table asked for; then D if dense was."""

    #: pushes applied on this server so far
    version: int
    #: the fewest steps applied of any worker since the phase began
    slowest: int


class TablePush(msgspec.Struct, frozen=True):
    """Gradients of one table. Its arrays: ids, gradients; and shows, clicks if `counted`."""

    table: int
    counted: bool = False


class Push(MessageBase, frozen=True):
    """Gradients of one optimizer's step. Arrays: those of each table; then its D if `dense`.

    Answer: Pushed; in sync mode when the pushes of all workers for that step are applied.
    """

    repeatable: ClassVar[bool] = True
    #: counts the pushes of a worker to a server; one that was applied is not applied again
    sequence: int
    epoch: int
    optimizer: int
    #: the worker's step, from 0: the bias correction of Adam uses step + 1
    step: int
    #: counts the barriers the worker has passed
    phase: int
    #: hyper-parameters of each param group, as they were for this gradient
    options: list[dict[str, Any]]
    tables: list[TablePush]
    dense: bool
    #: which dense parameters of the optimizer have no gradient
    absent: list[int] = msgspec.field(default_factory=list)
    #: the loss scaler found an infinity: the step is skipped
    skip: bool = False
    #: why the step must fail, for all workers and on all servers: it comes without gradients
    refusal: str = ""
    #: answer with dense values
    wants_dense: bool = True
    #: keep the gradients until Apply; answer with the square of their norm
    hold: bool = False
    #: how many steps were merged into this push
    merged: int = 1
    #: `version` of the values the gradients were made with
    seen: int = 0


class Apply(MessageBase, frozen=True):
    """Apply the gradients that were held, times a factor. Answer: Pushed."""

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


class Pushed(MessageBase, frozen=True):
    """Arrays: D (of all optimizers) if wanted; then for each of `changed`: positions, rows.

    `changed` are tables with rows pulled ahead that this step changed; positions are those in the
    list of ids pulled ahead, whose number is in `batches`.
    """

    version: int
    slowest: int
    applied: bool = True
    #: the square of the norm of held gradients on this server
    square: float = 0.0
    changed: list[int] = msgspec.field(default_factory=list)
    batches: list[int] = msgspec.field(default_factory=list)
    #: what all workers that made this step are to do behind it; where each makes its own steps,
    #: what was called for by now
    call: ControlSignal = NO_SIGNAL


class GeoExchange(MessageBase, frozen=True, tag="Exchange"):
    """GeoSGD. Arrays: ids, differences of each table; then D differences if `dense`.

    The server adds them. Answer: GeoExchangeReply.
    """

    repeatable: ClassVar[bool] = True
    sequence: int
    epoch: int
    step: int
    tables: list[int]
    dense: bool
    #: False: the differences are the last, nothing is wanted back
    wants: bool = True
    #: another piece of the same exchange follows
    more: bool = False


class GeoExchangeReply(MessageBase, frozen=True, tag="Exchanged"):
    """Arrays: the rows of each table asked for, as they are now; then D if dense was."""

    version: int
    slowest: int
    #: what was called for by now
    call: ControlSignal = NO_SIGNAL


class EndPhase(MessageBase, frozen=True):
    """The worker makes no more step before the coming barrier. Answer: Done."""

    repeatable: ClassVar[bool] = True
    phase: int


class Shrink(MessageBase, frozen=True):
    """A day has passed: decay the counts, forget rows. Answer: Shrunk."""

    repeatable: ClassVar[bool] = True
    table: int
    unseen_days: int
    score: float
    decay: float
    #: of the worker's call: one that was made is not made again; 0: it has none
    number: int = 0


class Shrunk(MessageBase, frozen=True):
    """How many rows were forgotten and how many are left."""

    removed: int
    left: int


class FiguresRequest(MessageBase, frozen=True, tag="Ask"):
    """What the server has counted. Answer: ServerFigures."""

    repeatable: ClassVar[bool] = True


class ServerFigures(MessageBase, frozen=True, tag="Counted"):
    """Figures of one server."""

    pushes: int
    rows: dict[str, int]
    nbytes: dict[str, int]
    #: how many pushes had been applied between the pull and the push of a gradient: value -> times
    staleness: dict[int, int]
