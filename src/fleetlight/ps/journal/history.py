# SPDX-License-Identifier: Apache-2.0
"""Reads a journal back, file after file, and mends the end at which its writer died."""

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
from fleetlight.ps.journal.records import Gap, LogRecord, Reader
from fleetlight.ps.journal.segment import cut, segment_path, segments
from fleetlight.ps.transport.protocol import MessageCodec

M = TypeVar("M")

#: how much is read before it is used, and how much of what was read the system holds
_AHEAD_BYTES, _LET_GO_BYTES = 4 << 20, 16 << 20


def history(
    folder: Path, codec: MessageCodec[M], first: int, say: Callable[[str], None]
) -> Iterator[LogRecord[M]]:
    """The records from there on.

    What was torn at the very end is cut off, or had not come to the disk yet when the machine
    stopped; all else is an error.
    """
    known = SyncedBytes.read(folder)
    files = [(start, path) for start, path in segments(folder) if start >= first]
    # of an empty one the writer died before its first record; another may have gone on since
    files = [(start, path) for start, path in files if path.stat().st_size]
    if known.first >= first and known.size and known.first not in dict(files):
        raise JournalError(_lost(segment_path(folder, known.first), 0, known.size))
    expected = first
    for start, path in files:
        if start != expected:
            raise JournalError(
                f"{folder}: records {expected} to {start - 1} are missing; restore the folder, or "
                "start anew from the newest checkpoint"
            )
        is_last, stop = path == files[-1][1], 0
        with _File(path) as file:
            reader = Reader(codec, file, start)
            with contextlib.closing(_ahead(reader)) as records:
                for record in records:
                    expected, stop = record.number + 1, record.stop
                    yield record
            if is_last:
                # it becomes one of those that are whole, whatever happens later
                file.sync()
        if reader.gap is not None:
            _mend(path, reader.gap, _Known(known.within(start), known.is_all_there, is_last), say)
        elif stop < known.within(start):
            raise JournalError(_lost(path, stop, known.within(start)))


def _lost(path: Path, size: int, synced: int) -> str:
    return (
        f"{path} is damaged: it ends at byte {size}, and {synced} bytes of it were on the disk; "
        "what was acknowledged is not all there any more. Restore the folder from a copy, or start "
        "anew from the newest checkpoint"
    )


@dataclasses.dataclass(frozen=True)
class _Known:
    """What must be there of a file."""

    #: so many bytes were on the disk
    synced: int
    #: and all that was written behind them is there, too, as the machine has not stopped since
    is_all_there: bool
    #: no file lies behind it
    is_last: bool

    def lies_behind(self, gap: Gap) -> str:
        """What says that a gap is none that a writer, or a machine, has left; "": nothing does."""
        if not self.is_last:
            return "behind it lies another file"
        if gap.at < self.synced:
            return f"{self.synced} bytes of it were on the disk"
        if self.is_all_there and gap.followed_by is not None:
            return f"behind it lies record {gap.followed_by}"
        if self.is_all_there and not gap.is_short:
            return "the machine has not stopped since it was written"
        return ""


class _File:
    """A file that is read once, from its beginning; it lets go of the memory that this takes."""

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
        """Wait until it is on the disk as it was read."""
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
                "folder from a copy, or start anew from the newest checkpoint"
            ) from error
        if start - self._let_go >= _LET_GO_BYTES:
            size = start - self._let_go
            os.posix_fadvise(self._fd, self._let_go, size, os.POSIX_FADV_DONTNEED)
            self._let_go = start
        return into


def _ahead(reader: Reader[M]) -> Generator[LogRecord[M]]:
    """Some records are read while those before are used."""
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


def _mend(path: Path, gap: Gap, known: _Known, say: Callable[[str], None]) -> None:
    damaged = known.lies_behind(gap)
    if damaged:
        raise JournalError(
            f"{path} is damaged at byte {gap.at}: {gap.why}, and {damaged}; what was acknowledged "
            "is not all there any more. Restore the folder from a copy, or start anew from the "
            "newest checkpoint"
        )
    size = path.stat().st_size - gap.at
    what = f"{path}: its last {size} bytes are no whole record ({gap.why}); "
    if known.is_all_there:
        say(f"{what}nobody was told that they were written, so they are cut off")
    else:
        behind = "" if gap.followed_by is None else f"; with them goes record {gap.followed_by}"
        say(
            f"{what}as far as is known they were not on the disk yet when the machine stopped, so "
            f"they are cut off{behind}"
        )
    cut(path, gap.at)
