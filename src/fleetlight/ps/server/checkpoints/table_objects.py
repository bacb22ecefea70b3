# SPDX-License-Identifier: Apache-2.0
"""`TableObjects`: the tables of a server as objects under the URL of a checkpoint.

Rows come in bucket order. They are cut into files of whole buckets, each the file of a table in
its own right, and each is uploaded as soon as it is full, while the next ones fill. So a server
needs no disk, another number of servers fetches only the files with its own buckets, and each file
is verified before its rows are used.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleetlight.errors import CheckpointError, CorruptCheckpointError, StoreError
from fleetlight.kernels import BUCKETS
from fleetlight.ps.messages import Load, TableFile
from fleetlight.ps.tables.saving.delta_files import name_of, part_of, write_ids
from fleetlight.ps.tables.server_state import ServerState, StateSnapshot
from fleetlight.ps.tables.table_file import (
    IDS,
    INDEX,
    REMOVED,
    Column,
    Pause,
    TableReader,
    layout,
    no_pause,
)
from fleetlight.ps.update import Floats, Ids
from fleetlight.store import ObjectStore, joined, store_at

#: bytes of rows in a file: few requests, and little that two servers both need
_MAX_FILE_BYTES, _MIN_FILE_BYTES = 64 << 20, 4 << 20
#: files of a table on one server, unless they become too large: two servers share few of them
_FILES = 32
#: files in memory: those on their way, and the one that is being filled or read
_AHEAD = 4


@dataclasses.dataclass(frozen=True)
class _BucketRange:
    """Whole buckets of a table that become one file."""

    number: int
    first: int
    stop: int


class _TableFileInMemory:
    """A file of a table in memory, while its rows arrive."""

    def __init__(
        self,
        cut: _BucketRange,
        columns: Sequence[Column],
        about: Mapping[str, str],
        starts: NDArray[np.int64],
    ) -> None:
        self.cut = cut
        row, end = starts[cut.first], starts[cut.stop]
        self.rows = int(end - row)
        index = np.clip(starts, row, end) - row
        header, offsets, size = layout(columns, self.rows, about, index)
        self.content = np.empty(size, np.uint8)
        self.content[: len(header)] = np.frombuffer(header, np.uint8)
        self._at(offsets[INDEX], len(index), np.int64)[:] = index
        self._ids = self._at(offsets[IDS], self.rows, np.int64)
        self._columns = [
            (c, self._at(offsets[c.name], self.rows * (c.stop - c.start), np.float32))
            for c in columns
        ]
        self.filled = 0

    def take(self, ids: Ids, values: Floats) -> int:
        """Add rows until the file is full; returns how many it took."""
        count = min(len(ids), self.rows - self.filled)
        stop = self.filled + count
        self._ids[self.filled : stop] = ids[:count]
        for column, flat in self._columns:
            part = flat.reshape(self.rows, column.stop - column.start)
            part[self.filled : stop] = values[:count, column.start : column.stop]
        self.filled = stop
        return count

    def _at(self, offset: int, count: int, dtype: type[Any]) -> NDArray[Any]:
        size = count * np.dtype(dtype).itemsize
        return self.content[offset : offset + size].view(dtype)


class _FileUploads:
    """Uploads of the files of one table, a few at a time."""

    def __init__(self, store: ObjectStore, server: int, table: int, part: str) -> None:
        self._store, self._server, self._table, self._part = store, server, table, part
        self._threads = ThreadPoolExecutor(_AHEAD, "fleet-upload")
        self._room = threading.Semaphore(_AHEAD)
        self._sent: list[Future[TableFile]] = []

    def send(self, piece: _TableFileInMemory) -> None:
        """Upload a file; waits while many others are on their way."""
        self._room.acquire()
        for one in self._sent:
            if one.done():
                one.result()
        self._sent.append(self._threads.submit(self._upload, piece))

    def finish(self) -> list[TableFile]:
        """Wait for all; returns them in order."""
        return [one.result() for one in self._sent]

    def close(self) -> None:
        """Drop what has not begun, and wait for the rest."""
        self._threads.shutdown(cancel_futures=True)

    def _upload(self, piece: _TableFileInMemory) -> TableFile:
        try:
            cut, data = piece.cut, piece.content.data
            name = name_of(self._table, self._server, self._part, f"part{cut.number:05d}")
            digest = hashlib.sha256(data).hexdigest()
            self._store.put(name, data)
            span = (cut.first, cut.stop)
            return TableFile(self._table, name, piece.rows, len(data), digest, span, self._part)
        finally:
            self._room.release()


class TableObjects:
    """The tables of one server in the folder of a generation."""

    def __init__(
        self,
        url: str,
        state: ServerState,
        most: int = _MAX_FILE_BYTES,
        least: int = _MIN_FILE_BYTES,
    ) -> None:
        """`most` and `least`: bytes of rows in a file."""
        self._store, self._state = store_at(url), state
        self._most, self._least = most, least

    def has(self, token: str) -> bool:
        """Whether worker 0 has put this object here."""
        return self._store.head(token) is not None

    def save(self, cut: StateSnapshot, pause: Pause = no_pause) -> list[TableFile]:
        """Write all tables as they were at the cut."""
        files: list[TableFile] = []
        for number, (table, rows) in enumerate(zip(self._state.tables, cut.tables, strict=True)):
            with self._explained(f"write table {table.plan.name!r}"):
                if rows.removed is not None and len(rows.removed):
                    with self._writer(number, REMOVED) as write:
                        files += write_ids(write, rows.removed, table.plan.name)
                with self._writer(number, part_of(rows.removed)) as write:
                    files += table.write(rows, write, pause)
        return files

    @contextlib.contextmanager
    def _writer(self, number: int, part: str) -> Iterator[_FilesWriter]:
        uploads = _FileUploads(self._store, self._state.server, number, part)
        try:
            yield _FilesWriter(uploads, self._most, self._least)
        finally:
            uploads.close()

    def check(self, message: Load) -> None:
        """Raise if files are missing or have another size; their bytes are verified as they load.

        That reads each byte once, and a table that does not load reports that it is not whole.
        """
        stores = self._stores(message)
        with self._explained("look for the files of tables"):
            sizes = {
                store.url: {entry.name: entry.size for entry in store.list()}
                for store in {store.url: store for store in stores.values()}.values()
            }
        for name, store in stores.items():
            got, (expected, _) = sizes[store.url].get(name), message.sums[name]
            if got != expected:
                what = "is missing" if got is None else f"has {got} bytes, expected {expected}"
                raise CorruptCheckpointError(
                    f"{joined(store.url, name)} {what}; load another checkpoint"
                )

    def load(self, message: Load) -> None:
        """Load the rows of this server."""
        names: dict[int, list[str]] = {n: [] for n in range(len(self._state.tables))}
        for number, name in message.files:
            self._state.table(number)
            names[number].append(name)
        about = {number: self._rows(number, some, message) for number, some in names.items()}
        stores = self._stores(message)

        def readers(number: int) -> Iterator[TableReader]:
            return self._readers({name: stores[name] for name in names[number]}, message.sums)

        try:
            self._state.load_from(readers, about)
        except (CheckpointError, StoreError) as error:
            raise type(error)(
                f"{error}. The tables of server {self._state.server} are not whole now: do not "
                "train on, start again from another checkpoint"
            ) from error

    def _rows(self, number: int, names: Sequence[str], message: Load) -> int:
        """About how many rows some files have."""
        row = 8 + 4 * self._state.tables[number].row_floats
        return sum(max(0, message.sums[name][0] - 8 * (BUCKETS + 1)) // row for name in names)

    def _stores(self, message: Load) -> dict[str, ObjectStore]:
        """Where each file is: in the folder of the generation, or in that of its base."""
        stores = {name: self._store for _, name in message.files}
        if message.base:
            base = store_at(message.base)
            # some files of the base have no rows of this server
            stores |= {name: base for name in message.base_files if name in stores}
        return stores

    def _readers(
        self, stores: Mapping[str, ObjectStore], sums: Mapping[str, tuple[int, str]]
    ) -> Iterator[TableReader]:
        """The files of a table, verified; the next ones are fetched meanwhile."""
        with ThreadPoolExecutor(_AHEAD, "fleet-fetch") as threads:
            coming: list[Future[TableReader]] = []
            rest = iter(stores)
            try:
                while True:
                    while len(coming) < _AHEAD and (name := next(rest, "")):
                        coming.append(threads.submit(_fetched, stores[name], name, *sums[name]))
                    if not coming:
                        return
                    yield coming.pop(0).result()
            finally:
                for one in coming:
                    one.cancel()

    @contextlib.contextmanager
    def _explained(self, what: str) -> Iterator[None]:
        try:
            yield
        except StoreError as error:
            raise CheckpointError(
                f"server {self._state.server} could not {what}: {error}"
            ) from error


def _fetched(store: ObjectStore, name: str, size: int, sha256: str) -> TableReader:
    """A file, verified."""
    where, data = joined(store.url, name), store.get(name).data
    got = memoryview(data).nbytes, hashlib.sha256(data).hexdigest()
    if got != (size, sha256):
        raise CorruptCheckpointError(
            f"{where} was changed after it was written: got {got[0]} bytes with sha256 "
            f"{got[1]}, expected {size} with {sha256}; load another checkpoint"
        )
    return TableReader(where, np.frombuffer(data, np.uint8))


@dataclasses.dataclass(frozen=True)
class _FilesWriter:
    """Cuts the rows of a table into files; implements `TableWriter`."""

    uploads: _FileUploads
    most: int
    least: int

    def __call__(
        self,
        columns: Iterable[Column],
        rows: int,
        pieces: Iterable[tuple[Ids, Floats]],
        about: Mapping[str, str],
        pause: Pause = no_pause,
        starts: NDArray[np.int64] | None = None,
        /,
    ) -> list[TableFile]:
        """Send each file as soon as it is full; returns their descriptions."""
        assert starts is not None, "rows of a checkpoint come in bucket order"
        columns = list(columns)
        row_bytes = 8 + sum(4 * (column.stop - column.start) for column in columns)
        cuts = iter(cuts_of(starts, row_bytes, self.most, self.least))
        piece = _TableFileInMemory(next(cuts), columns, about, starts)
        for ids, values in pieces:
            done = 0
            while done < len(ids):
                done += piece.take(ids[done:], values[done:])
                if piece.filled == piece.rows and (cut := next(cuts, None)):
                    self.uploads.send(piece)
                    piece = _TableFileInMemory(cut, columns, about, starts)
            pause()
        if piece.filled != piece.rows or next(cuts, None):
            raise CheckpointError(f"got fewer rows than the {rows} of the table; nothing was saved")
        self.uploads.send(piece)
        return self.uploads.finish()


def cuts_of(starts: NDArray[np.int64], row_bytes: int, most: int, least: int) -> list[_BucketRange]:
    """Ranges of buckets whose rows together are about a file; one for a table without rows."""
    total = int(starts[-1])
    if not total:
        return [_BucketRange(0, 0, len(starts) - 1)]
    nbytes = max(least, min(most, total * row_bytes // _FILES))
    rows = max(1, nbytes // row_bytes)
    cuts: list[_BucketRange] = []
    stop = 0
    while starts[stop] < total:
        # buckets without rows are in no file
        first = int(np.searchsorted(starts, starts[stop], "right")) - 1
        end = min(int(starts[first]) + rows, total)
        # the last bucket that fits, or the first one with the last row
        fits = int(np.searchsorted(starts, end, "left" if end == total else "right"))
        stop = max(fits if end == total else fits - 1, first + 1)
        cuts.append(_BucketRange(len(cuts), first, stop))
    return cuts
