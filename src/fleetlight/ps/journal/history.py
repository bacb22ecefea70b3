# SPDX-License-Identifier: Apache-2.0
"""Reads a log segment after segment, and truncates the end at which its writer was killed."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from fleetlight.errors import JournalError
from fleetlight.ps.journal.fsync_marker import SyncedBytes
from fleetlight.ps.journal.records import Gap, LogRecord, RecordReader
from fleetlight.ps.journal.segment import cut, segment_path, segments
from fleetlight.ps.transport.protocol import MessageCodec

M = TypeVar("M")

#: bytes that are read before they are used, and read bytes that stay in the page cache
_AHEAD_BYTES, _LET_GO_BYTES = 4 << 20, 16 << 20


def history(
    folder: Path, codec: MessageCodec[M], first: int, say: Callable[[str], None]
) -> Iterator[LogRecord[M]]:
    """Yield the records from `first` on.

    A torn end, or one that had not reached the disk when the machine stopped, is truncated. Any
    other damage is an error.
    """
    known = SyncedBytes.read(folder)
    files = [(start, path) for start, path in segments(folder) if start >= first]
    # the writer of an empty file was killed before its first record; another may have continued
    files = [(start, path) for start, path in files if path.stat().st_size]
    if known.first >= first and known.size and known.first not in dict(files):
        raise JournalError(_lost(segment_path(folder, known.first), 0, known.size))
    expected = first
    for start, path in files:
        if start != expected:
            raise JournalError(
                f"{folder}: records {expected} to {start - 1} are missing; restore the folder, or "
                "start again from the newest checkpoint"
            )
        is_last, stop = path == files[-1][1], 0
        with _File(path) as file:
            reader = RecordReader(codec, file, start)
            with contextlib.closing(_ahead(reader)) as records:
                for record in records:
                    expected, stop = record.number + 1, record.stop
                    yield record
            if is_last:
                # from now on it counts as complete, whatever happens later
                file.sync()
        if reader.gap is not None:
            _truncate(
                path, reader.gap, _Known(known.within(start), known.is_all_there, is_last), say
            )
        elif stop < known.within(start):
            raise JournalError(_lost(path, stop, known.within(start)))


def _lost(path: Path, size: int, synced: int) -> str:
    return (
        f"{path} is damaged: it ends at byte {size}, and {synced} bytes of it were on the disk; "
        "acknowledged changes are lost. Restore the folder from a copy, or start "
        "again from the newest checkpoint"
    )


@dataclasses.dataclass(frozen=True)
class _Known:
    """The part of a segment that must be intact."""

    #: bytes that were on disk
    synced: int
    #: all later bytes are there as well, as the machine has not restarted since
    is_all_there: bool
    #: no segment follows
    is_last: bool

    def evidence_of_damage(self, gap: Gap) -> str:
        """Why a gap is damage, and not the torn end of a writer or machine; "": it may be one."""
        if not self.is_last:
            return "another file follows it"
        if gap.at < self.synced:
            return f"{self.synced} bytes of it were on the disk"
        if self.is_all_there and gap.followed_by is not None:
            return f"record {gap.followed_by} follows it"
        if self.is_all_there and not gap.is_short:
            return "the machine has not stopped since it was written"
        return ""


class _File:
    """A file that is read once, from its beginning, and does not stay in the page cache."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._size = os.fstat(self._fd).st_size
        self._let_go = 0
        os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)

    def __enter__(self) -> _File:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)

    def __len__(self) -> int:
        return self._size

    def sync(self) -> None:
        """Flush the file to disk as it was read."""
        try:
            os.fdatasync(self._fd)
        except OSError as error:
            raise JournalError(
                f"{self._path} could not be written: {error.strerror or error}; repair the disk, "
                "and start the job again"
            ) from error

    def __getitem__(self, where: slice) -> NDArray[np.uint8]:
        start, stop, _ = where.indices(self._size)
        into = np.empty(stop - start, np.uint8)
        rest, at = into.data, start
        try:
            while rest and (count := os.preadv(self._fd, [rest], at)):
                rest, at = rest[count:], at + count
        except OSError as error:
            raise JournalError(
                f"{self._path} cannot be read at byte {at}: {error.strerror or error}; restore the "
                "folder from a copy, or start again from the newest checkpoint"
            ) from error
        if start - self._let_go >= _LET_GO_BYTES:
            size = start - self._let_go
            os.posix_fadvise(self._fd, self._let_go, size, os.POSIX_FADV_DONTNEED)
            self._let_go = start
        return into


def _ahead(reader: RecordReader[M]) -> Generator[LogRecord[M]]:
    """Read the next records in a thread while the caller uses those before."""
    records = iter(reader)
    with ThreadPoolExecutor(1, "fleet-history") as thread:
        coming = thread.submit(_some, records)
        while some := coming.result():
            coming = thread.submit(_some, records)
            yield from some


def _some(records: Iterator[LogRecord[M]]) -> list[LogRecord[M]]:
    found: list[LogRecord[M]] = []
    size = 0
    while size < _AHEAD_BYTES and (one := next(records, None)) is not None:
        found.append(one)
        size += one.stop - one.start
    return found


def _truncate(path: Path, gap: Gap, known: _Known, say: Callable[[str], None]) -> None:
    damaged = known.evidence_of_damage(gap)
    if damaged:
        raise JournalError(
            f"{path} is damaged at byte {gap.at}: {gap.why}, and {damaged}; acknowledged "
            "changes are lost. Restore the folder from a copy, or start again from the newest "
            "checkpoint"
        )
    size = path.stat().st_size - gap.at
    what = f"{path}: its last {size} bytes are no whole record ({gap.why}); "
    if known.is_all_there:
        say(f"{what}no worker has a reply to them, so they are cut off")
    else:
        behind = "" if gap.followed_by is None else f"; with them goes record {gap.followed_by}"
        say(
            f"{what}they were probably not on the disk when the machine stopped, so "
            f"they are cut off{behind}"
        )
    cut(path, gap.at)
