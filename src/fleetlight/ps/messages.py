# SPDX-License-Identifier: Apache-2.0
"""The messages between workers and servers. Pure data: arrays travel separately.

A worker sends a request and receives one reply. Each class lists its arrays in order; D are the
dense blocks of that server in the order of `placement.Placement.blocks_of`. A new message needs
its class here, and a handler in `server/server.py`.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Union

import msgspec

from fleetlight.ps.message_base import Done as Done
from fleetlight.ps.message_base import Failure as Failure
from fleetlight.ps.message_base import MessageBase
from fleetlight.ps.plan import Plan
from fleetlight.ps.rendezvous_messages import *  # noqa: F403
from fleetlight.ps.resume import Decision, Remains, Report
from fleetlight.security.token import AuthRequest, Challenge, Proof
from fleetlight.wire.control_signals import NO_SIGNAL, ControlSignal


# Messages by which a worker joins a server.
class Greeting(MessageBase, frozen=True):
    """The first message on a connection. Reply: Welcome."""

    fleetlight: str
    worker: int
    worker_num: int
    server: int
    server_num: int
    #: the stamp of its first start: distinguishes unrelated processes with the same worker index
    started_at: int
    #: control | push | pull
    lane: str
    #: the worker has joined before: the server replies once it has restored its values
    joined: bool = False
    #: number of times that the worker was started; a restarted worker resumes at its last step
    incarnation: int = 1
    #: how long the worker may be absent during a restart
    away_s: float = 0.0
    #: the last push that this server acknowledged to this worker; 0 when servers may lose pushes
    acknowledged: int = 0
    #: the worker joins a job that is running
    joins: bool = False
    #: how many workers the job may have while it runs; None: it keeps its workers
    worker_max: int | None = None


class Welcome(MessageBase, frozen=True):
    """The server admits the worker, or confirms its plan."""

    server: int
    #: number of loaded checkpoints; pushes of an older epoch are refused
    epoch: int
    #: number of times that the server was started on the same values; 0: not known yet
    incarnation: int = 1
    #: the state of the server's folder, when the whole job resumes
    remains: Remains | None = None


class ShareMemory(MessageBase, frozen=True):
    """Offer memory of this host for the bodies of the connection's frames. Reply: Done."""

    #: where the descriptor waits (`wire/shared_memory.py`), and what its receiver must know
    name: str
    ticket: bytes
    slot_bytes: Annotated[int, msgspec.Meta(ge=1 << 12, le=1 << 30)]


class Resume(MessageBase, frozen=True):
    """Report the worker's folder and wait for the reports of all workers. Reply: Resumed.

    The reply is Done while a server that resumes is not open yet; the worker then asks again.
    """

    repeatable: ClassVar[bool] = True
    report: Report
    #: False in a process with an embedded server, which opens later
    waits: bool = True


class Resumed(MessageBase, frozen=True):
    """The decision for all processes."""

    decision: Decision
    #: the last push of the worker that the server applied
    mark: int = 0
    #: how many pushes of the worker wait until the gradient norm is known
    held: int = 0
    #: the other workers continued without this worker
    was_lost: bool = False


class Join(MessageBase, frozen=True):
    """Send the worker's plan; the server replies when it has its own. Reply: Welcome.

    The reply is Done while the server reads a checkpoint; the worker then asks again.
    """

    repeatable: ClassVar[bool] = True
    plan: Plan


# Pulls of values, and pushes of gradients and differences.
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


class MetricsRequest(MessageBase, frozen=True):
    """Request the counters of a server. Reply: ServerMetrics."""

    repeatable: ClassVar[bool] = True


class ServerMetrics(MessageBase, frozen=True):
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


# Barriers, heartbeats and goodbyes.
class Barrier(MessageBase, frozen=True):
    """Wait for all workers at server 0. Arrays: bytes of this worker. Reply: BarrierReply."""

    repeatable: ClassVar[bool] = True
    meeting: int
    operation: str
    deadline_s: float


class BarrierReply(MessageBase, frozen=True):
    """Arrays: the bytes of every worker, in worker order."""


class Leave(MessageBase, frozen=True):
    """Goodbye of a worker; `error` is set after a failure. Reply: Done."""

    repeatable: ClassVar[bool] = True
    error: str = ""
    #: True when the worker left because of a stop signal
    stopped: bool = False


class GoodbyeAck(MessageBase, frozen=True):
    """All servers confirmed the worker's goodbye; it sends no further request. Reply: Done."""


class Heartbeat(MessageBase, frozen=True):
    """A heartbeat, with the control signal of the worker. Reply: HeartbeatAck."""

    repeatable: ClassVar[bool] = True
    step: int
    call: ControlSignal = NO_SIGNAL
    #: the worker stops and reaches no further barrier
    stops: bool = False


class HeartbeatAck(MessageBase, frozen=True):
    """The merged control signals, and the number of workers that have not left."""

    call: ControlSignal = NO_SIGNAL
    here: int = 0


# Messages that save and load checkpoints: table files, dense values and optimizer state.
class TableFile(msgspec.Struct, frozen=True):
    """The file that a server wrote for one table."""

    table: int
    name: str
    rows: int
    bytes: int
    sha256: str
    #: the first bucket in it, and the one after the last; None: all of the server
    buckets: tuple[int, int] | None = None
    #: "delta": rows that replace those of the base; "removed": only ids; "": a whole table
    part: str = ""


class SnapshotRequest(MessageBase, frozen=True):
    """Take a snapshot for the next Save and FetchDense. Reply: SnapshotTaken.

    A snapshot is quick; training continues while Save writes it.
    """

    repeatable: ClassVar[bool] = True
    #: the name of a save with all rows that may be a base: changes after it are marked from now on
    name: str = ""
    #: the base that the checkpoint has, which says which earlier save succeeded
    base: str = ""
    #: only the changes since the base are wanted
    delta: bool = False


class SnapshotTaken(MessageBase, frozen=True):
    """What the snapshot has."""

    #: False: all rows; the server does not know all changes since the base, as after a restart
    is_delta: bool
    #: by table: all rows, including those that only the base has
    rows: list[int]
    #: bytes of all rows in files, and of what this save writes
    bytes: int
    written: int


class Save(MessageBase, frozen=True):
    """Write the tables, or their snapshot, into a folder of the server or a URL. Reply: Saved.

    Without a folder the server writes them into a temporary one, for ReadFile.
    """

    folder: str
    #: name of a file that worker 0 wrote into the folder: proves that both see the same folder
    token: str
    #: sync mode: all servers take the snapshot after this step; otherwise between two pushes
    step: int


class Saved(MessageBase, frozen=True):
    """Arrays: none; `marks` are the high-water marks of the workers."""

    files: list[TableFile]
    marks: list[tuple[int, int, int]]


class ReadFile(MessageBase, frozen=True):
    """Read a part of a file in the server's temporary folder. Reply: FileChunk."""

    repeatable: ClassVar[bool] = True
    name: str
    offset: int
    size: int


class FileChunk(MessageBase, frozen=True):
    """Arrays: the bytes; fewer than requested at the end of the file."""


class WriteFile(MessageBase, frozen=True):
    """Write a part of a file into the server's temporary folder. Arrays: bytes. Reply: Done."""

    repeatable: ClassVar[bool] = True
    name: str
    offset: int


class DropSnapshot(MessageBase, frozen=True):
    """Drop the snapshot and the temporary folder, if any. Reply: Done."""

    repeatable: ClassVar[bool] = True


class FetchDense(MessageBase, frozen=True):
    """Return the state of the dense blocks, or of their snapshot. Reply: FetchedDense."""

    repeatable: ClassVar[bool] = True


class FetchedDense(MessageBase, frozen=True):
    """Arrays: D; then the tensors of `state`, whose entries are (slice, name, kind).

    Slices are numbered over the server's blocks; `scalars` has one entry for each slice.
    """

    state: list[tuple[int, str, str]]
    scalars: list[dict[str, bool | int | float | None]]


class Load(MessageBase, frozen=True):
    """Read the rows of this server from the files of a checkpoint, or its URL. Reply: Done.

    Without a folder the files are those of WriteFile.
    """

    folder: str
    #: number of the table, name of the file
    files: list[tuple[int, str]]
    epoch: int
    #: size and sha256 of files by name; the server checks those with rows of its own
    sums: dict[str, tuple[int, str]] = msgspec.field(default_factory=dict)
    #: only check that all files exist and match the plan
    dry: bool = False
    #: the folder or URL of the files that the base has, and their names
    base: str = ""
    base_files: list[str] = msgspec.field(default_factory=list)


class RestoreDense(MessageBase, frozen=True):
    """Load dense values and state in the form of FetchedDense; only slices of this server."""

    state: list[tuple[int, str, str]]
    scalars: list[dict[str, bool | int | float | None]]


# Messages by which worker 0 publishes what the servers have.
class PublicationRequest(MessageBase, frozen=True):
    """Ask what changed since a publication; changes are marked from now on. Reply: Changed.

    A cut that became no publication ends; its changes belong to the next one. Changes of other
    tables are no longer marked.
    """

    repeatable: ClassVar[bool] = True
    tables: list[int]
    #: the last publication that is complete; "" if there is none
    published: str


class Changed(MessageBase, frozen=True):
    """By table of the request: rows that changed or were removed, and all rows."""

    #: False: the server does not know all changes since, as after a restart
    is_complete: bool
    changed: list[int]
    rows: list[int]
    #: bytes of all tables of the request
    bytes: int


class PublicationCut(MessageBase, frozen=True):
    """Keep the present rows for PublicationWrite. Reply: PublicationTaken. A cut is quick."""

    publication: str
    tables: list[int]
    #: the publication whose changes since are published; "": all rows are
    since: str


class PublicationTaken(MessageBase, frozen=True):
    """Arrays: D, at the cut."""


class PublicationWrite(MessageBase, frozen=True):
    """Write the cut into files. Reply: PublicationWritten."""

    publication: str
    #: the store, and the names in it before those of tables
    url: str
    prefix: str
    #: by table of the cut: the form of its rows
    forms: list[str]


class PublishedFile(msgspec.Struct, frozen=True):
    """The file that a server wrote for one table."""

    table: int
    name: str
    bytes: int
    sha256: str
    rows: int
    removed: int


class PublicationWritten(MessageBase, frozen=True):
    """The files, in the order of the tables."""

    files: list[PublishedFile]


# The shard queue: server 0 leases ranges of a loader's records to workers on demand.
class LeaseRequest(MessageBase, frozen=True):
    """Request the worker's next range of records. Reply: LeaseReply.

    The reply is Done while other workers hold all remaining records; with `waits` the worker asks
    again.
    """

    repeatable: ClassVar[bool] = True
    loader: int
    #: number of the pass over the loader by all workers; from 1
    turn: int
    epoch: int
    #: number of the worker's lease in this pass; a repeated request returns the same range
    number: int
    #: a lease of the worker, and a position in it: all records before are done
    reached: tuple[int, int]
    #: the first pass that the worker may still request after a restart
    back: int
    #: positions of the epoch that this pass leases out
    whole: list[tuple[int, int]]
    #: records of one batch, and the maximum number of batches in a range
    unit: int
    batches: int
    #: the worker has no other work
    waits: bool = False


class LeaseReply(MessageBase, frozen=True):
    """Positions in the epoch's order; empty when all records are done."""

    start: int
    stop: int
    #: this pass has ended early: the records that the next pass of the same epoch leases out
    left: list[tuple[int, int]] = msgspec.field(default_factory=list)
    #: how many workers train now; 0 where their number is fixed
    active: int = 0


class LeaseProgress(MessageBase, frozen=True):
    """The worker's progress in a pass, as in `LeaseRequest`. Reply: Done."""

    repeatable: ClassVar[bool] = True
    loader: int
    turn: int
    reached: tuple[int, int]
    #: the worker returns its leases of this pass to the queue
    gives_back: bool = False


class RemainingRequest(MessageBase, frozen=True):
    """Which records of a pass are not done yet. Reply: Remaining."""

    repeatable: ClassVar[bool] = True
    loader: int
    turn: int


class Remaining(MessageBase, frozen=True):
    """Free or leased ranges; None for a pass that no worker has started."""

    ranges: list[tuple[int, int]] | None


# A worker joins a job that is running.
class PlaceRequest(MessageBase, frozen=True):
    """The first message to server 0 of a worker that will join. Reply: FreePlace.

    A scheduler replies Located; the worker then asks server 0.
    """

    fleetlight: str
    torch: str
    #: the stamp of its start; a repeated request gets the same place
    started_at: int


class FreePlace(MessageBase, frozen=True):
    """A free place for a worker, and what its process must know of the job."""

    worker: int
    worker_num: int
    worker_max: int
    server_endpoints: list[tuple[str, int]]
    #: True if the servers announce themselves at the rendezvous, since they may move
    announces: bool = False
    #: the folder of the job's checkpoints; "" if it saves nothing
    checkpoint: str = ""
    job: str = ""


class PreludeRequest(MessageBase, frozen=True):
    """Request the results of all barriers before the first lease. Reply: Prelude.

    The reply is Done until a worker has requested a lease, and the worker then asks again; it is
    Admitted if the job has ended.
    """

    repeatable: ClassVar[bool] = True


class Prelude(MessageBase, frozen=True):
    """Barriers in their order. Arrays: those of all workers of the first barrier, then the next."""

    operations: list[str]
    #: by barrier: the number of its arrays
    counts: list[int]


class Admit(MessageBase, frozen=True):
    """Request to join at the start of a pass over a loader. Reply: Admitted.

    The reply is Done while there is no such start; the worker then asks again.
    """

    repeatable: ClassVar[bool] = True
    loader: int


class Admitted(MessageBase, frozen=True):
    """The pass that the worker may join. Arrays: the state of worker 0, as bytes."""

    turn: int
    #: True when the job has ended: there is no pass any more
    is_over: bool = False


class Held(MessageBase, frozen=True):
    """The reply to LeaseRequest while workers join at the start of its pass; ask again."""

    #: the worker sends its state first
    wants_state: bool = False


class OfferState(MessageBase, frozen=True):
    """The state that workers take which join at this pass. Arrays: bytes. Reply: Done."""

    repeatable: ClassVar[bool] = True
    loader: int
    turn: int


class Enter(MessageBase, frozen=True):
    """The worker takes part from this phase on. Reply: Entered.

    Server 0 is the first to get it, and holds the pass until it gets EnteredAll.
    """

    repeatable: ClassVar[bool] = True
    phase: int
    loader: int
    turn: int


class Entered(MessageBase, frozen=True):
    """Whether the worker takes part; if not, it asks again to be admitted."""

    is_member: bool


class EnteredAll(MessageBase, frozen=True):
    """All servers count the worker. Reply: Done."""

    repeatable: ClassVar[bool] = True


# messages of the token's proof are in `security`, which knows no other message
if TYPE_CHECKING:
    Message = MessageBase | AuthRequest | Challenge | Proof
else:
    _CLASSES = [
        kind
        for kind in [*globals().values()]
        if isinstance(kind, type) and issubclass(kind, MessageBase) and kind is not MessageBase
    ]
    Message = Union[(*_CLASSES, AuthRequest, Challenge, Proof)]
