# SPDX-License-Identifier: Apache-2.0
"""`RowLog`: the rows of a table that are not in memory, in a file without a name.

Records are appended to segments. A segment whose records are all dropped is written again. The file
is scratch space: no later process reads it, and the system deletes it with the process. Servers
recover from checkpoints and journals instead.

Reads are sorted, and the system gets all of them before the first one waits. So the device works on
many at once, without a thread for each.
"""

from __future__ import annotations

import os
import tempfile
import weakref
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fleetlight.errors import ConfigError, RowFileError
from fleetlight.ps.journal.disk_full_retry import once_there_is_room
from fleetlight.ps.update import Floats, Ids

Positions = NDArray[np.int32]
#: positions + 1 fit int32
_MAX_RECORDS = 2**31 - 2
_SEGMENT_BYTES = 1 << 20
_PAGE = 4096
#: segments that may be partly used before records move, beside twice the space of live records
_SLACK = 4
#: how long a write is retried while the disk is full
PATIENCE_S = 60.0


class RowLog:
    """Implements `RowStore`. Not thread-safe: the table's lock is held."""

    def __init__(
        self,
        folder: Path,
        table: str,
        width: int,
        segment_bytes: int = _SEGMENT_BYTES,
        patience_s: float = PATIENCE_S,
    ) -> None:
        """A record has `width` floats. The file is made when it is first needed."""
        self._folder, self._table, self._patience_s = folder, table, patience_s
        self._width, self._record = width, 4 * width
        #: records in a segment
        self._size = max(1, segment_bytes // self._record)
        self._file: int | None = None
        #: by segment: its live records, and whether it is written to the end and in use
        self._live = np.zeros(0, np.int64)
        self._is_full = np.zeros(0, np.bool_)
        #: segments without live records
        self._empty: list[int] = []
        #: the segment that grows, and its records; it is never in `_empty`
        self._current, self._filled = -1, self._size

    @property
    def nbytes(self) -> int:
        """Bytes of the file."""
        return len(self._live) * self._size * self._record

    def append(self, records: Floats) -> Positions:
        """See `RowStore`."""
        runs = list(self._runs(len(records)))
        done = 0
        for segment, at, count in runs:
            first = segment * self._size + at
            self._write(first, records[done : done + count])
            done += count
        for segment, at, count in runs:
            if segment != self._current:
                self._begin(segment)
            self._filled = at + count
            self._live[segment] += count
        return np.concatenate(
            [np.zeros(0, np.int32)]
            + [np.arange(count, dtype=np.int32) + s * self._size + at for s, at, count in runs]
        ).astype(np.int32)

    def read(self, positions: Ids) -> Floats:
        """See `RowStore`."""
        if not len(positions):
            return np.empty((0, self._width), np.float32)
        order = np.argsort(positions)
        at = positions[order]
        records = np.empty((len(at), self._width), np.float32)
        starts = np.flatnonzero(np.diff(at, prepend=-2) != 1)
        counts = np.diff(starts, append=len(at))
        offsets, sizes = at[starts] * self._record, counts * self._record
        try:
            self._read(offsets.tolist(), sizes.tolist(), records.data.cast("B"))
        except OSError as error:
            raise self._failed("read", error) from error
        if (order[1:] > order[:-1]).all():
            return records
        found = np.empty_like(records)
        found[order] = records
        return found

    def expect(self, positions: Ids) -> None:
        """See `RowStore`."""
        if self._file is None:
            return
        # those of one page are one read
        pages = np.unique(positions * self._record // _PAGE)
        for offset in (pages * _PAGE).tolist():
            os.posix_fadvise(self._file, offset, _PAGE, os.POSIX_FADV_WILLNEED)

    def free(self, positions: Ids) -> None:
        """See `RowStore`."""
        segments, counts = np.unique(positions // self._size, return_counts=True)
        self._live[segments] -= counts
        gone = segments[(self._live[segments] == 0) & self._is_full[segments]]
        self._is_full[gone] = False
        self._empty += gone.tolist()

    def sparse_positions(self) -> NDArray[np.int64] | None:
        """See `RowStore`."""
        full = int(self._is_full.sum())
        if full * self._size <= 2 * int(self._live.sum()) + _SLACK * self._size:
            return None
        segment = int(np.where(self._is_full, self._live, self._size + 1).argmin())
        return np.arange(segment * self._size, (segment + 1) * self._size)

    def _runs(self, count: int) -> Iterator[tuple[int, int, int]]:
        """Segment, first record and number of records of each piece of an append."""
        segment, filled = self._current, self._filled
        fresh = [*reversed(self._empty)]
        new = len(self._live)
        while count:
            if filled == self._size:
                segment, filled = (fresh.pop(0), 0) if fresh else (new, 0)
                new += segment == new
            piece = min(count, self._size - filled)
            yield segment, filled, piece
            filled += piece
            count -= piece

    def _begin(self, segment: int) -> None:
        """Let another segment grow."""
        last = self._current
        if last >= 0:
            if self._live[last]:
                self._is_full[last] = True
            else:
                self._empty.insert(0, last)
        if segment == len(self._live):
            self._live = np.append(self._live, 0)
            self._is_full = np.append(self._is_full, False)
        else:
            self._empty.remove(segment)
        self._current, self._filled = segment, 0

    def _write(self, first: int, records: Floats) -> None:
        if first + len(records) > _MAX_RECORDS:
            raise ConfigError(
                f"table {self._table!r}: its file has {_MAX_RECORDS} records, the most; "
                "use more servers"
            )
        try:
            once_there_is_room(
                self._folder, lambda: self._put(first * self._record, records), self._patience_s
            )
        except OSError as error:
            raise self._failed("written", error) from error

    def _put(self, offset: int, records: Floats) -> None:
        file = self._opened()
        view = np.ascontiguousarray(records).data.cast("B")
        if offset % (self._size * self._record) == 0:
            # here, not when the system writes to the disk later, a full disk is noticed
            os.posix_fallocate(file, offset, self._size * self._record)
        while view:
            done = os.pwrite(file, view, offset)
            offset += done
            view = view[done:]

    def _read(self, offsets: list[int], sizes: list[int], view: memoryview) -> None:
        file = self._opened()
        if len(offsets) > 1:
            for offset, size in zip(offsets, sizes, strict=True):
                os.posix_fadvise(file, offset, size, os.POSIX_FADV_WILLNEED)
        done = 0
        for offset, size in zip(offsets, sizes, strict=True):
            stop = done + size
            while done < stop:
                got = os.preadv(file, [view[done:stop]], offset + size - (stop - done))
                if not got:
                    raise OSError(None, f"it ends before byte {offset + size}")
                done += got

    def _opened(self) -> int:
        if self._file is None:
            self._folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self._folder) as file:
                self._file = os.dup(file.fileno())
            weakref.finalize(self, os.close, self._file)
            os.posix_fadvise(self._file, 0, 0, os.POSIX_FADV_RANDOM)
        return self._file

    def _failed(self, done: str, error: OSError) -> RowFileError:
        return RowFileError(
            f"table {self._table!r}: rows that are not in memory cannot be {done} in "
            f"{self._folder}: {error.strerror or error}; make room or repair the disk, name "
            "another folder in strategy.a_sync_configs.table_folder, or raise the table's memory="
        )
