# SPDX-License-Identifier: Apache-2.0
"""`Journal`: writes changes in their order, many at a time (group commit).

The first thread that commits writes for all that have put records meanwhile, and the others wait.
While the disk is full the write is retried: no worker was promised what is not yet written.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

from fleetlight.errors import DeadlineError, JournalError
from fleetlight.ps.journal.disk_full_retry import is_full, once_there_is_room
from fleetlight.ps.journal.records import Framed, framed
from fleetlight.ps.journal.segment import Segment
from fleetlight.ps.transport.protocol import Array, MessageCodec
from fleetlight.wire.plain import Buffer

M = TypeVar("M")
T = TypeVar("T")

#: when records are flushed: at each commit; by a thread, once a second; never
COMMIT, SECOND, NEVER = "commit", "second", "never"
SYNC_S = 1.0
#: the thread flushes at once after so many bytes: the less the page cache holds, the faster
SYNC_BYTES = 16 << 20


@dataclasses.dataclass(frozen=True)
class Policy:
    """When a journal flushes, and how long it retries."""

    sync: str = SECOND
    #: how long to wait for a disk that is full or does not respond
    patience_s: float = 60.0


class Journal(Generic[M]):
    """The growing end of a log. Any thread may call its methods."""

    def __init__(
        self,
        folder: Path,
        codec: MessageCodec[M],
        first: int,
        policy: Policy,
        say: Callable[[str], None],
    ) -> None:
        self._folder, self._codec, self._policy, self._say = folder, codec, policy, say
        self._changed = threading.Condition()
        #: the number of the next record
        self._next = first
        #: records that no thread writes yet
        self._pending: list[Buffer] = []
        #: the last record that is written, or flushed with the policy `COMMIT`
        self._done = first - 1
        self._is_writing = False
        self._failure: JournalError | None = None
        self._segment = once_there_is_room(
            folder, lambda: self._begun(first), policy.patience_s, say
        )
        self._over = threading.Event()
        self._is_dirty = threading.Event()
        self._is_due = threading.Event()
        self._syncing = threading.Thread(target=self._keep_synced, name="fleet-sync", daemon=True)
        if policy.sync == SECOND:
            self._syncing.start()

    @property
    def next(self) -> int:
        """The number of the next record."""
        with self._changed:
            return self._next

    @property
    def size(self) -> int:
        """Bytes in the current segment."""
        return self._segment.size

    def framed(self, message: M, arrays: Sequence[Array] = ()) -> Framed:
        """Encode a change; this is the slow part, and needs no lock."""
        return framed(self._codec, message, arrays)

    def put(self, record: Framed) -> int:
        """Append a change, to be written by the next commit; return its number."""
        with self._changed:
            self._check()
            number, self._next = self._next, self._next + 1
            self._pending += record.sealed(number)
            return number

    def commit(self, number: int) -> None:
        """Return once all changes up to this one are written."""
        while (buffers := self._turn(lambda: self._done >= number)) is not None:
            self._write(*buffers)

    def sync(self) -> None:
        """Flush all that is written to disk."""
        self._guarded(self._segment.sync)

    def rotate(self) -> int:
        """Write all records, and start a new segment; return its first record.

        A record that is put meanwhile is the last of the old segment, or the first of the new one.
        """
        old = None
        while old is None:
            self.commit(self.next - 1)
            with self._changed:
                self._check()
                first = self._next
                if self._segment.first == first:
                    return first
                # another thread may have put a record since, or still write
                if not self._pending and not self._is_writing:
                    old = self._replaced(first)
        old.close()
        return first

    def close(self, *, is_needed: bool = True) -> None:
        """Write all records, if they are needed, and close the segment."""
        try:
            if is_needed:
                self.commit(self.next - 1)
                self._guarded(self._segment.sync)
        finally:
            self._over.set()
            self._is_due.set()
            if self._syncing.is_alive():
                self._syncing.join()
            with self._changed:
                self._failure = self._failure or JournalError(f"{self._folder}: it is closed")
                self._changed.notify_all()
            self._segment.close()

    def _replaced(self, first: int) -> Segment:
        """Start a new segment and return the old one; called with `_changed` held."""
        old = self._segment
        self._guarded(old.sync)
        self._segment = self._begun(first)
        return old

    def _begun(self, first: int) -> Segment:
        """A new segment. If the disk is full, the journal continues in the one before."""
        try:
            return Segment(self._folder, first)
        except OSError as error:
            failure = JournalError(
                f"{self._folder}: a file for records from {first} on could not be begun: "
                f"{error.strerror or error}; make room or repair the disk"
            )
            if not is_full(error):
                self._failure = self._failure or failure
            raise failure from error

    def _turn(self, is_done: Callable[[], bool]) -> tuple[list[Buffer], int] | None:
        """The records to write, once no other thread writes; None when all is done."""
        with self._changed:
            while not is_done():
                self._check()
                if not self._is_writing:
                    self._is_writing = True
                    pending, self._pending = self._pending, []
                    return pending, self._next - 1
                # the writer waits no longer, and raises the reason
                if not self._changed.wait(2 * self._policy.patience_s):
                    raise DeadlineError(
                        f"{self._segment.path}: a write has taken more than "
                        f"{2 * self._policy.patience_s:g} s; check the disk"
                    )
        return None

    def _write(self, buffers: list[Buffer], last: int) -> None:
        done = None
        try:
            self._guarded(lambda: self._written(buffers))
            done = last
        finally:
            with self._changed:
                self._is_writing = False
                if done is not None:
                    self._done = done
                self._changed.notify_all()

    def _written(self, buffers: list[Buffer]) -> None:
        path, patience_s = self._segment.path, self._policy.patience_s
        once_there_is_room(
            path, lambda: self._segment.write(buffers), patience_s, self._say, self._over.wait
        )
        if self._policy.sync == COMMIT:
            self._segment.sync()
        else:
            self._is_dirty.set()
            if self._segment.unsynced >= SYNC_BYTES:
                self._is_due.set()

    def _guarded(self, act: Callable[[], T]) -> T:
        """Return `act()`; after a failure the journal refuses all further records."""
        try:
            return act()
        except OSError as error:
            failure = JournalError(
                f"{self._segment.path} could not be written: {error.strerror or error}; make room "
                "or repair the disk, and start the job again: all that was acknowledged is in it"
            )
            with self._changed:
                self._failure = self._failure or failure
                self._changed.notify_all()
            raise failure from error

    def _check(self) -> None:
        if self._failure is not None:
            raise JournalError(str(self._failure))

    def _keep_synced(self) -> None:
        while not self._over.is_set():
            self._is_due.wait(SYNC_S)
            self._is_due.clear()
            if self._is_dirty.is_set():
                self._is_dirty.clear()
                try:
                    self.sync()
                except JournalError:
                    return
