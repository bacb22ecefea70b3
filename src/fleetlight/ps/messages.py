# SPDX-License-Identifier: Apache-2.0
"""What workers and servers say to each other. Pure data: arrays travel beside a message.

A worker speaks first and gets one answer. Each class says which arrays go with it, in order; D are
the dense blocks of that server in the order of `placement.Placement.blocks_of`.
"""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec

from fleetlight.ps.plan import Plan


class _Message(msgspec.Struct, frozen=True, tag=True):
    #: True when the same request may be sent again after a lost connection
    repeatable: ClassVar[bool] = False


class Hello(_Message, frozen=True):
    """The first words on a connection. Answer: Welcome."""

    fleetlight: str
    worker: int
    worker_num: int
    server: int
    server_num: int
    #: tells apart two lives of the same worker
    incarnation: int
    #: control | push | pull
    lane: str
    #: the worker has joined before: it is answered once the server has taken up its values again
    joined: bool = False


class Welcome(_Message, frozen=True):
    """The server takes the worker in, or into its plan."""

    server: int
    #: counts the loads of checkpoints; pushes of an older epoch are refused
    epoch: int
    #: how often the server has been started on the same values
    life: int = 1


class Join(_Message, frozen=True):
    """The worker's plan, once it is known; waits until the server's is too. Answer: Welcome.

    Or Done, while the server reads a checkpoint: then the worker asks again.
    """

    repeatable: ClassVar[bool] = True
    plan: Plan


class Fill(_Message, frozen=True):
    """Worker 0's first values. Arrays: ids, rows of each table in `tables`; then D if `dense`."""

    repeatable: ClassVar[bool] = True
    tables: list[int]
    dense: bool
    #: the values are a checkpoint's: they count more than those that are there
    loaded: bool = False


class TablePull(msgspec.Struct, frozen=True):
    """The rows wanted of one table."""

    table: int
    #: False: an unknown id reads its first value and leaves no row behind
    insert: bool


class Pull(_Message, frozen=True):
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


class Pulled(_Message, frozen=True):
    """Arrays: rows of each table asked for; then D if dense was."""

    #: pushes applied on this server so far
    version: int
    #: the fewest steps applied of any worker since the phase began
    slowest: int


class TablePush(msgspec.Struct, frozen=True):
    """Gradients of one table. Its arrays: ids, gradients; and shows, clicks if `counted`."""

    table: int
    counted: bool = False


class Push(_Message, frozen=True):
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
    absent: list[int] = []
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


class Apply(_Message, frozen=True):
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


class Pushed(_Message, frozen=True):
    """Arrays: D (of all optimizers) if wanted; then for each of `changed`: positions, rows.

    `changed` are tables with rows pulled ahead that this step changed; positions are those in the
    list of ids pulled ahead, whose number is in `batches`.
    """

    version: int
    slowest: int
    applied: bool = True
    #: the square of the norm of held gradients on this server
    square: float = 0.0
    changed: list[int] = []
    batches: list[int] = []


class Exchange(_Message, frozen=True):
    """GeoSGD. Arrays: ids, differences of each table; then D differences if `dense`.

    The server adds them. Answer: Exchanged.
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


class Exchanged(_Message, frozen=True):
    """Arrays: the rows of each table asked for, as they are now; then D if dense was."""

    version: int
    slowest: int


class EndPhase(_Message, frozen=True):
    """The worker makes no more step before the coming barrier. Answer: Done."""

    repeatable: ClassVar[bool] = True
    phase: int


class Meet(_Message, frozen=True):
    """Wait for all workers at server 0. Arrays: bytes of this worker. Answer: Met."""

    repeatable: ClassVar[bool] = True
    meeting: int
    operation: str
    deadline_s: float


class Met(_Message, frozen=True):
    """Arrays: the bytes of every worker, in their order."""


class Leave(_Message, frozen=True):
    """Goodbye; `error` is set when it is a bad end. Answer: Done."""

    repeatable: ClassVar[bool] = True
    error: str = ""


class Beat(_Message, frozen=True):
    """A sign of life. Answer: Done."""

    repeatable: ClassVar[bool] = True
    step: int


class TableFile(msgspec.Struct, frozen=True):
    """What a server wrote of one table."""

    table: int
    name: str
    rows: int
    bytes: int
    sha256: str


class Cut(_Message, frozen=True):
    """Hold on to everything as it is now, for the next Save and Fetch. Answer: Done.

    That is quick, so that training goes on while Save writes what was held on to.
    """

    repeatable: ClassVar[bool] = True


class Save(_Message, frozen=True):
    """Write the tables into a folder (of the server), as they are or were cut. Answer: Saved.

    Without a folder they go into a temporary one of the server's own, for Take.
    """

    folder: str
    #: a file name in the folder that worker 0 wrote: proves that the folder is the same
    token: str
    #: each server cuts after the same step in sync mode, between two pushes otherwise
    step: int


class Saved(_Message, frozen=True):
    """Arrays: none; `marks` are the sequence numbers applied of each worker."""

    files: list[TableFile]
    marks: list[tuple[int, int, int]]


class Take(_Message, frozen=True):
    """A piece of a file in the server's temporary folder. Answer: Taken."""

    repeatable: ClassVar[bool] = True
    name: str
    offset: int
    size: int


class Taken(_Message, frozen=True):
    """Arrays: the bytes, fewer than were asked for at the end of the file."""


class Put(_Message, frozen=True):
    """Arrays: the bytes of a piece of a file, for the server's temporary folder. Answer: Done."""

    repeatable: ClassVar[bool] = True
    name: str
    offset: int


class Drop(_Message, frozen=True):
    """Let go of the cut and of the temporary folder, if there are any. Answer: Done."""

    repeatable: ClassVar[bool] = True


class Fetch(_Message, frozen=True):
    """State of the dense blocks, as it is or was cut. Answer: Fetched."""

    repeatable: ClassVar[bool] = True


class Fetched(_Message, frozen=True):
    """Arrays: D; then the tensors of `state`, whose entries are (piece, name, kind).

    Pieces are counted over the server's blocks; `scalars` has one entry for each.
    """

    state: list[tuple[int, str, str]]
    scalars: list[dict[str, bool | int | float | None]]


class Load(_Message, frozen=True):
    """Read the rows of this server out of a checkpoint's files. Answer: Done.

    Without a folder the files are those that were Put.
    """

    folder: str
    #: number of the table, name of the file
    files: list[tuple[int, str]]
    epoch: int
    #: size and sha256 of files by name; those with rows of this server are compared
    sums: dict[str, tuple[int, str]] = {}
    #: only look whether everything is there and fits
    dry: bool = False


class Restore(_Message, frozen=True):
    """Dense values and state, as Fetched gives them; only the pieces of this server."""

    state: list[tuple[int, str, str]]
    scalars: list[dict[str, bool | int | float | None]]


class Shrink(_Message, frozen=True):
    """A day has passed: decay the counts, forget rows. Answer: Shrunk."""

    table: int
    unseen_days: int
    score: float
    decay: float


class Shrunk(_Message, frozen=True):
    """How many rows were forgotten and how many are left."""

    removed: int
    left: int


class Ask(_Message, frozen=True):
    """What the server has counted. Answer: Counted."""

    repeatable: ClassVar[bool] = True


class Counted(_Message, frozen=True):
    """Figures of one server."""

    pushes: int
    rows: dict[str, int]
    nbytes: dict[str, int]
    #: how many pushes had been applied between the pull and the push of a gradient: value -> times
    staleness: dict[int, int]


class Done(_Message, frozen=True):
    """The request was carried out; there is nothing to say about it."""


class Failure(_Message, frozen=True):
    """The request could not be carried out: the name of an error class and its sentence."""

    kind: str
    text: str


Message = (
    Hello | Welcome | Join | Fill | Pull | Pulled | Push | Apply | Pushed | Exchange | Exchanged
    | EndPhase | Meet | Met | Leave | Beat | Cut | Save | Saved | Take | Taken | Put | Drop | Fetch
    | Fetched | Load | Restore | Shrink | Shrunk | Ask | Counted | Done | Failure
)  # fmt: skip


def encode_failure(failure: Failure) -> bytes:
    """A failure as bytes, for workers that tell each other."""
    return msgspec.json.encode(failure)


def decode_failure(data: bytes) -> Failure:
    """The way back."""
    return msgspec.json.decode(data, type=Failure)
