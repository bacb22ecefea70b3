# SPDX-License-Identifier: Apache-2.0
"""Reads a journal back, file after file, and mends the end at which its writer died."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from fleetlight.errors import JournalError
from fleetlight.ps.journal.records import Gap, Reader, Record
from fleetlight.ps.journal.segment import cut, segments
from fleetlight.ps.transport.protocol import Codec

M = TypeVar("M")

#: how much is read before it is used, and how much of what was read the system holds
_AHEAD_BYTES, _LET_GO_BYTES = 4 << 20, 16 << 20


def history(
    folder: Path, codec: Codec[M], first: int, say: Callable[[str], None]
) -> Iterator[Record[M]]:
    """The records from there on. What was torn at the very end is cut off; all else is an error."""
    files = [(start, path) for start, path in segments(folder) if start >= first]
    expected = first
    for start, path in files:
        if start != expected:
            raise JournalError(
                f"{folder}: records {expected} to {start - 1} are missing; restore the folder, or "
                "start anew from the newest checkpoint"
            )
        with _File(path) as file:
            reader = Reader(codec, file, start)
            with contextlib.closing(_ahead(reader)) as records:
                for record in records:
                    expected = record.number + 1
                    yield record
        if reader.gap is not None:
            _mend(path, reader.gap, path == files[-1][1], say)


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


def _ahead(reader: Reader[M]) -> Generator[Record[M]]:
    """Some records are read while those before are used."""
    records = iter(reader)
    with ThreadPoolExecutor(1, "fleet-history") as thread:
        coming = thread.submit(_some, records)
        while some := coming.result():
            coming = thread.submit(_some, records)
            yield from some


def _some(records: Iterator[Record[M]]) -> list[Record[M]]:
    found: list[Record[M]] = []
    size = 0
    while size < _AHEAD_BYTES and (one := next(records, None)) is not None:
        found.append(one)
        size += one.stop - one.start
    return found


def _mend(path: Path, gap: Gap, is_last: bool, say: Callable[[str], None]) -> None:
    if gap.followed_by is not None or not is_last:
        behind = "others" if gap.followed_by is None else f"record {gap.followed_by}"
        raise JournalError(
            f"{path} is damaged at byte {gap.at}: {gap.why}, and behind it lies {behind}; what was "
            "acknowledged is not all there any more. Restore the folder from a copy, or start anew "
            "from the newest checkpoint"
        )
    size = path.stat().st_size
    say(
        f"{path}: its last {size - gap.at} bytes are no whole record ({gap.why}); nobody was told "
        "that they were written, so they are cut off"
    )
    cut(path, gap.at)
