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
#: the least share of a core for a snapshot during training
_SHARE = 0.1
#: how often the thread checks if a snapshot is due
_LOOK_S = 1.0
_TRY_EVERY_S = 0.05
#: the delay before the next snapshot after a failure
_FAILED_S = 30.0


@dataclasses.dataclass(frozen=True)
class Durable:
    """How and where a server logs its state."""

    path: Path
    #: True: log every change; False: write snapshots only
    log: bool = True
    #: the name of this launch; "" if it has none
    job: str = ""
    #: the number of gang restarts of this launch
    start: int = 0
    #: recover the state of an earlier launch
    resume: bool = False
    #: fail if there is no state to recover
    must_exist: bool = False
    #: the decision of all processes if the whole job resumes
    decision: Decision | None = None
    policy: Policy = dataclasses.field(default_factory=Policy)
    #: how long workers may take to reconnect after a restart of the server
    away_s: float = 120.0
    #: the interval of snapshots, and the log size that starts one earlier
    snapshot_s: float = 300.0
    snapshot_bytes: int = 1 << 30


class SnapshotJob(Protocol):
    """The tables, for one snapshot."""

    def cut(self) -> None:
        """Cut the rows; the caller ensures that no thread changes them."""

    def write(self, folder: Path, pause: Pause) -> list[TableFile]:
        """Write the cut during training; call `pause` between two pieces."""

    def is_awaited(self) -> bool:
        """True if a checkpoint waits for this snapshot."""

    def close(self) -> None:
        """Drop the cut."""


class DurableState(Protocol):
    """The state of a server that the log and snapshots contain."""

    def recovery_view(self) -> DurableState:
        """A view for recovery from another launch, which does not change present workers."""

    def baseline(self) -> list[Written]:
        """The first records of a log file: a `Baseline`, then held steps and the last barrier."""

    def restore(self, baseline: Baseline, arrays: Sequence[Array], *, is_last: bool) -> None:
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
        """A snapshot of the rows; None while a checkpoint is being written."""


class _UnneededError(Exception):
    """The job is over, so the snapshot in progress is not needed."""


class _CheckpointWaitsError(Exception):
    """A checkpoint waits for the snapshot in progress, which stops."""


class Durability:
    """The folder of one server, from its start to its end."""

    #: False once the job is over
    _is_needed = True
    #: True if the last snapshot stopped for a checkpoint
    _has_yielded = False

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
        self._replayed_bytes = 0
        #: when the newest snapshot of this incarnation was complete, by the monotonic clock
        self._snapshot_at: float | None = None
        self._over = threading.Event()
        self._snapshots = threading.Thread(target=self._watch, name="fleet-snapshots", daemon=True)

    @property
    def incarnation(self) -> int:
        """The incarnation of the server: how often it has started on this folder."""
        return self._folder.identity.incarnation

    @property
    def is_new(self) -> bool:
        """True if there is nothing to recover, so that the script sets the values."""
        return self._folder.is_new

    def recover(self, values: DurableState) -> int:
        """Recover the values; return the number of the next change."""
        if self._folder.is_resumed:
            # workers of this launch may have entered barriers already
            values = values.recovery_view()
        first, files = self._folder.base()
        if files is not None:
            values.load(files, self._folder.rows_folder(first))
        last, begun = first - 1, False
        for record in history(self._folder.path, CODEC, first, logger.warning):
            last = record.number
            if isinstance(record.message, Baseline):
                # later baselines repeat what the replay has restored
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
                self.incarnation,
                "" if files is None else "a snapshot and ",
                first - base,
                self._folder.path,
            )
        self._folder.drop_incomplete()
        self._replayed_bytes = self._folder.log_bytes()
        self._values, self._log = values, log
        self._journal = Journal(
            self._folder.path, CODEC, first, self._durable.policy, logger.warning
        )
        # workers may connect meanwhile: the baseline or the log contains each
        with values.at_rest():
            self._put_baseline(self._journal)
            log.start(self._journal, values=self._durable.log)
        log.wait_on_disk()
        if not self._folder.is_own:
            # the next incarnation recovers from this folder: the checkpoint may change, and
            # workers of an earlier job are irrelevant
            self.snapshot_now()
            self._folder.own()
        self._snapshots.start()

    def snapshot(self, pause: Callable[[SnapshotJob], Pause] = lambda rows: no_pause) -> bool:
        """Write the present rows and drop the older log; False while a checkpoint is written."""
        rows = self._values.rows()
        if rows is None:
            return False
        try:
            self._write(rows, pause(rows))
        finally:
            rows.close()
        return True

    def snapshot_now(self) -> None:
        """Write a snapshot; wait for a checkpoint in progress and for free disk space."""
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
        # sync most of the log before excluding changes
        journal.commit(journal.next - 1)
        journal.sync()
        with self._values.at_rest():
            rows.cut()
            replaced = journal.size
            first = journal.rotate()
            self._replayed_bytes += replaced
            self._put_baseline(journal)
        journal.commit(journal.next - 1)
        try:
            self._write_rows(rows, pause, journal, first)
        except Exception:
            # the journal may wait for the disk space of the incomplete snapshot
            self._folder.drop_incomplete()
            raise
        self._replayed_bytes = 0
        self._snapshot_at = time.monotonic()
        self._has_yielded = False
        self._folder.drop_before(first)

    def _write_rows(
        self, rows: SnapshotJob, pause: Pause, journal: Journal[Change], first: int
    ) -> None:
        folder = self._folder.rows_folder(first)
        folder.mkdir(exist_ok=True)
        files = rows.write(folder, pause)
        # the new log file has all state except rows, and replaces the old file
        journal.sync()
        self._folder.complete(first, files)

    def metrics(self) -> dict[str, float]:
        """The size of the journal, and the age of the newest snapshot."""
        journal = self._journal
        size = 0 if journal is None else self._replayed_bytes + journal.size
        found = {"journal_bytes": float(size)}
        if self._snapshot_at is not None:
            found["snapshot_age_seconds"] = time.monotonic() - self._snapshot_at
        return found

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

    def _put_baseline(self, journal: Journal[Change]) -> None:
        for change, arrays in self._values.baseline():
            journal.put(journal.framed(change, arrays))

    def _watch(self) -> None:
        passed_s = 0.0
        while not self._over.wait(_LOOK_S):
            passed_s += _LOOK_S
            if passed_s >= self._durable.snapshot_s or self._is_long():
                passed_s = 0.0 if self._try_snapshot(self._throttled_snapshot) else passed_s

    def _is_long(self) -> bool:
        """True if the next incarnation would replay too many bytes."""
        assert self._journal is not None
        return self._replayed_bytes + self._journal.size >= self._durable.snapshot_bytes

    def _throttled_snapshot(self) -> bool:
        """Write a throttled snapshot; the longer the journal, the larger its share of a core."""
        throttle = Throttle(functools.partial(self._share, self._replayed_bytes), self._over.wait)
        return self.snapshot(lambda rows: functools.partial(self._pause, rows, throttle))

    def _pause(self, rows: SnapshotJob, throttle: Throttle) -> None:
        """Throttle the snapshot, or stop it for a waiting checkpoint.

        A snapshot does not stop after one that stopped: frequent checkpoints would prevent all.
        """
        if not self._is_needed:
            raise _UnneededError
        if not rows.is_awaited():
            throttle()
        elif not self._has_yielded:
            raise _CheckpointWaitsError

    def _share(self, replayed_bytes: int) -> float:
        """The share of a core: it grows with the log, up to 1 when the next snapshot is due."""
        assert self._journal is not None
        if self._over.is_set():
            return 1.0
        return max(
            _SHARE, ((replayed_bytes + self._journal.size) / self._durable.snapshot_bytes) ** 2
        )

    def _try_snapshot(self, act: Callable[[], bool]) -> bool:
        """Try a snapshot; after a failure the journal still contains all changes."""
        try:
            return act()
        except _UnneededError:
            return True
        except _CheckpointWaitsError:
            self._has_yielded = True
            return False
        except Exception as error:
            logger.warning("a snapshot in %s failed: %s", self._folder.path, error)
            self._over.wait(_FAILED_S)
            return True


#: shorter work adds up before a rest, because sleep is not precise
_MIN_WORK_S = 1e-3
#: bounds the rest after a clock jump or one long piece
_MAX_REST_S = 1.0


class Throttle:
    """Limits a background thread, which calls it between pieces of work, to a share of a core."""

    def __init__(self, share: Callable[[], float], wait: Callable[[float], object]) -> None:
        """`share` returns the share of a core, above 0; `wait` sleeps up to so many seconds."""
        self._share, self._wait = share, wait
        self._began = time.thread_time()

    def __call__(self) -> None:
        """Rest in proportion to the work since the last rest."""
        worked_s = time.thread_time() - self._began
        if worked_s < _MIN_WORK_S:
            return
        if (share := self._share()) < 1:
            self._wait(min(_MAX_REST_S, worked_s * (1 / share - 1)))
        self._began = time.thread_time()
