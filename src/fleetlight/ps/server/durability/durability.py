# SPDX-License-Identifier: Apache-2.0
"""`Durability`: a server recovers its values from a journal and snapshots.

Every change is in the journal before a reply confirms it. From time to time a background thread
writes a snapshot of the rows and drops the journal before it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from numpy.typing import NDArray

from fleetlight.errors import DeadlineError
from fleetlight.observe.log import logger
from fleetlight.ps.changes import Baseline, Change
from fleetlight.ps.journal.disk_full_retry import once_there_is_room
from fleetlight.ps.journal.folder import Folder, FolderIdentity
from fleetlight.ps.journal.history import history
from fleetlight.ps.journal.journal import Journal, Policy
from fleetlight.ps.messages import TableFile
from fleetlight.ps.resume import Decision
from fleetlight.ps.server.write_ahead_log import WriteAheadLog
from fleetlight.ps.tables.table_file import Pause, no_pause
from fleetlight.ps.transport.protocol import FILE_HEADER_LIMIT, MessageCodec

Array = NDArray[Any]
Written = tuple[Change, Sequence[Array]]
CODEC: MessageCodec[Change] = MessageCodec(Change, header_limit=FILE_HEADER_LIMIT)
#: of a core: what a snapshot takes from training at least
_SHARE = 0.1
#: how often it is looked whether a snapshot is due
_LOOK_S = 1.0
_TRY_EVERY_S = 0.05
#: when a snapshot is tried again that has failed
_FAILED_S = 30.0


@dataclasses.dataclass(frozen=True)
class Durable:
    """How a server's values are kept, and where."""

    path: Path
    #: every change is written down; else only snapshots are kept
    log: bool = True
    #: the name of this launch; "" if it has none
    job: str = ""
    #: how often all its processes have been started together
    start: int = 0
    #: recover what an earlier launch has left
    resume: bool = False
    #: and fail if it has left nothing
    must_exist: bool = False
    #: what all processes have agreed on, where the whole job is started again
    decision: Decision | None = None
    policy: Policy = dataclasses.field(default_factory=Policy)
    #: how long workers may take to call again where the server was started again
    away_s: float = 120.0
    #: rows are written that often, or once the journal has so many bytes
    snapshot_s: float = 300.0
    snapshot_bytes: int = 1 << 30


class SnapshotJob(Protocol):
    """The tables, for one snapshot."""

    def cut(self) -> None:
        """Cut the rows; the caller ensures that no thread changes them."""

    def write(self, folder: Path, pause: Pause) -> list[TableFile]:
        """Write the cut during training; call `pause` between two pieces."""

    def is_awaited(self) -> bool:
        """Whether a checkpoint waits for this snapshot, and workers for the checkpoint."""

    def close(self) -> None:
        """Drop the cut."""


class DurableState(Protocol):
    """What is kept."""

    def of_others(self) -> DurableState:
        """A view for recovery from another launch, which leaves present workers untouched."""

    def standing(self) -> list[Written]:
        """What the first records of a file say: a `Baseline`, then what it has no place for."""

    def restore(self, standing: Baseline, arrays: Sequence[Array], *, is_last: bool) -> None:
        """Recover everything but rows; `is_last`: later changes were not logged."""

    def load(self, files: Sequence[TableFile], folder: Path) -> None:
        """Recover rows."""

    def redo(self, change: Change, arrays: Sequence[Array]) -> None:
        """Replay a change of an earlier incarnation."""

    def forget_workers(self) -> None:
        """Forget the workers; other workers start at their first step."""

    def at_rest(self) -> contextlib.AbstractContextManager[None]:
        """Exclude all changes inside the block."""

    def rows(self) -> SnapshotJob | None:
        """For a snapshot; None: not now, a checkpoint is being written."""


class _UnneededError(Exception):
    """The job is over, so the snapshot in progress is not needed."""


class _GivesWayError(Exception):
    """A checkpoint is to be written now."""


class Durability:
    """The folder of one server, from its start to its end."""

    #: False once the job is over
    _is_needed = True
    #: the snapshot before has given way to a checkpoint
    _gave_way = False

    def __init__(self, durable: Durable, identity: FolderIdentity) -> None:
        self._durable = durable
        self._folder = Folder.open(
            durable.path,
            identity,
            resume=durable.resume,
            must_exist=durable.must_exist,
            decision=durable.decision,
            patience_s=durable.policy.patience_s,
        )
        self._journal: Journal[Change] | None = None
        #: bytes of the log that this incarnation replayed, and the next would replay again
        self._read_back = 0
        self._over = threading.Event()
        self._snapshots = threading.Thread(target=self._watch, name="fleet-snapshots", daemon=True)

    @property
    def life(self) -> int:
        """How often a server has been started on this folder."""
        return self._folder.identity.life

    @property
    def is_new(self) -> bool:
        """True where there is nothing to recover: values are those of the script."""
        return self._folder.is_new

    def recover(self, values: DurableState) -> int:
        """Recover the values; return the number of the next change."""
        if self._folder.is_resumed:
            # workers of this job meet already
            values = values.of_others()
        first, files = self._folder.base()
        if files is not None:
            values.load(files, self._folder.rows_folder(first))
        last, begun = first - 1, False
        for record in history(self._folder.path, CODEC, first, logger.warning):
            last = record.number
            if isinstance(record.message, Baseline):
                # those of later files say what was redone
                if not begun:
                    is_last = not self._durable.log
                    values.restore(record.message, record.arrays, is_last=is_last)
                begun = True
            else:
                values.redo(record.message, record.arrays)
        if self._folder.is_resumed:
            values.forget_workers()
        return last + 1

    def begin(self, values: DurableState, log: WriteAheadLog) -> None:
        """Recover the values, and log all changes from now on."""
        first = self.recover(values)
        if first > 1:
            base, files = self._folder.base()
            logger.info(
                "incarnation %d of this server: recovered %s%d changes from %s",
                self.life,
                "" if files is None else "a snapshot and ",
                first - base,
                self._folder.path,
            )
        self._folder.drop_incomplete()
        self._read_back = self._folder.log_bytes()
        self._values, self._log = values, log
        self._journal = Journal(
            self._folder.path, CODEC, first, self._durable.policy, logger.warning
        )
        # workers may greet and meet already: each is in the one or in the other
        with values.at_rest():
            self._put_standing(self._journal)
            log.keep(self._journal, values=self._durable.log)
        log.settle()
        if not self._folder.is_own:
            # the next incarnation recovers from here: the checkpoint may change, and
            # workers of an earlier job are irrelevant
            self.snapshot_now()
            self._folder.own()
        self._snapshots.start()

    def snapshot(self, pause: Callable[[SnapshotJob], Pause] = lambda rows: no_pause) -> bool:
        """Write the rows as they are now, and drop what lies before; False: not now."""
        rows = self._values.rows()
        if rows is None:
            return False
        try:
            self._write(rows, pause(rows))
        finally:
            rows.close()
        return True

    def snapshot_now(self) -> None:
        """The same, once a checkpoint that is being written is done, and there is room."""
        patience_s = self._durable.policy.patience_s
        end = time.monotonic() + patience_s
        while not once_there_is_room(self._folder.path, self.snapshot, patience_s):
            if time.monotonic() > end:
                raise DeadlineError(
                    f"{self._folder.path}: a snapshot waited {patience_s:g} s for a checkpoint to "
                    "be written"
                )
            time.sleep(_TRY_EVERY_S)

    def _write(self, rows: SnapshotJob, pause: Pause) -> None:
        journal = self._journal
        assert journal is not None
        # most of it, before the others have to wait
        journal.commit(journal.next - 1)
        journal.sync()
        with self._values.at_rest():
            rows.cut()
            behind = journal.size
            first = journal.rotate()
            self._read_back += behind
            self._put_standing(journal)
        journal.commit(journal.next - 1)
        try:
            self._write_rows(rows, pause, journal, first)
        except Exception:
            # the room that it takes may be what the journal waits for
            self._folder.drop_incomplete()
            raise
        self._read_back = 0
        self._gave_way = False
        self._folder.drop_before(first)

    def _write_rows(
        self, rows: SnapshotJob, pause: Pause, journal: Journal[Change], first: int
    ) -> None:
        folder = self._folder.rows_folder(first)
        folder.mkdir(exist_ok=True)
        files = rows.write(folder, pause)
        # what rows are not, the new file says, and the old one goes
        journal.sync()
        self._folder.complete(first, files)

    def close(self, *, is_needed: bool = True, ended: bool = False) -> None:
        """Stop writing; delete the folder if it is not needed (`ended`: all workers have left)."""
        self._is_needed = is_needed
        if not is_needed:
            # first: a server killed during the rest must not leave a folder to recover from
            self._folder.end(ended=ended)
        self._over.set()
        if self._snapshots.is_alive():
            self._snapshots.join()
        if self._journal is not None:
            self._journal.close(is_needed=is_needed)
        if not is_needed:
            self._folder.clear()
        self._folder.close()

    def _put_standing(self, journal: Journal[Change]) -> None:
        for change, arrays in self._values.standing():
            journal.put(journal.framed(change, arrays))

    def _watch(self) -> None:
        passed_s = 0.0
        while not self._over.wait(_LOOK_S):
            passed_s += _LOOK_S
            if passed_s >= self._durable.snapshot_s or self._is_long():
                passed_s = 0.0 if self._tried(self._beside_training) else passed_s

    def _is_long(self) -> bool:
        """Whether the next life would have much to read back."""
        assert self._journal is not None
        return self._read_back + self._journal.size >= self._durable.snapshot_bytes

    def _beside_training(self) -> bool:
        """A snapshot that takes its time, and the more of it the longer the journal has become."""
        pace = Throttle(functools.partial(self._share, self._read_back), self._over.wait)
        return self.snapshot(lambda rows: functools.partial(self._between, rows, pace))

    def _between(self, rows: SnapshotJob, pace: Throttle) -> None:
        """A checkpoint is written in its place, for which all workers may wait.

        But not in the place of two, or there would be none where checkpoints are many.
        """
        if not self._is_needed:
            raise _UnneededError
        if not rows.is_awaited():
            pace()
        elif not self._gave_way:
            raise _GivesWayError

    def _share(self, read_back: int) -> float:
        """All of a core where the next snapshot is due already, or where all wait for this one.

        Until then little: a snapshot is soon done, and most of the log's room is there for it.
        """
        assert self._journal is not None
        if self._over.is_set():
            return 1.0
        return max(_SHARE, ((read_back + self._journal.size) / self._durable.snapshot_bytes) ** 2)

    def _tried(self, act: Callable[[], bool]) -> bool:
        """Run a snapshot; a failure loses nothing, since the journal continues."""
        try:
            return act()
        except _UnneededError:
            return True
        except _GivesWayError:
            self._gave_way = True
            return False
        except Exception as error:
            logger.warning("a snapshot in %s failed: %s", self._folder.path, error)
            self._over.wait(_FAILED_S)
            return True


#: what is shorter is not followed by a rest: sleeping is not as exact as that
_LEAST_S = 1e-3
#: bounds the rest after a clock jump or one long piece
_MOST_S = 1.0


class Throttle:
    """Limits a background thread, which calls it between pieces of work, to a share of a core."""

    def __init__(self, share: Callable[[], float], wait: Callable[[float], object]) -> None:
        """Work that `share` of the time, above 0; `wait` sleeps so many seconds or less."""
        self._share, self._wait = share, wait
        self._began = time.thread_time()

    def __call__(self) -> None:
        """Rest in proportion to the work since the last rest."""
        worked_s = time.thread_time() - self._began
        if worked_s < _LEAST_S:
            return
        if (share := self._share()) < 1:
            self._wait(min(_MOST_S, worked_s * (1 / share - 1)))
        self._began = time.thread_time()
