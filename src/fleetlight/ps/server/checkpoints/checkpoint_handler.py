# SPDX-License-Identifier: Apache-2.0
"""`CheckpointHandler`: a server's part in saving and loading a checkpoint during training."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleetlight.errors import CheckpointError, CorruptCheckpointError, ProtocolError, StoreError
from fleetlight.kernels import BUCKETS
from fleetlight.ps.high_water_marks import Mark
from fleetlight.ps.messages import (
    Done,
    FetchedDense,
    FileChunk,
    Load,
    ReadFile,
    RestoreDense,
    Save,
    Saved,
    SnapshotRequest,
    SnapshotTaken,
    TableFile,
    WriteFile,
)
from fleetlight.ps.server.shared_exclusive_lock import SharedExclusiveLock
from fleetlight.ps.server.steps.pushes import PushHandler
from fleetlight.ps.server.steps.request_dedup import Reply
from fleetlight.ps.tables import ordered_snapshot as snapshot
from fleetlight.ps.tables import unordered_snapshot as sweep
from fleetlight.ps.tables.dense_state import DenseState
from fleetlight.ps.tables.saving import unsaved_rows
from fleetlight.ps.tables.saving.delta_files import name_of, part_of, write_ids
from fleetlight.ps.tables.server_state import ServerState, StateSnapshot, is_file
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
from fleetlight.ps.tables.unpacking import Unpacking
from fleetlight.ps.update import Floats, Ids
from fleetlight.store import ObjectStore, is_url, joined, store_at

Bytes = NDArray[np.uint8]


class FileTransfer:
    """A temporary folder of a server, created on first use."""

    def __init__(self, server: int) -> None:
        self._server = server
        self._lock = threading.Lock()
        self._made: tempfile.TemporaryDirectory[str] | None = None

    @property
    def folder(self) -> Path:
        """The folder of the files."""
        with self._lock:
            if self._made is None:
                prefix = f"fleet-server{self._server}-"
                self._made = tempfile.TemporaryDirectory(prefix=prefix, ignore_cleanup_errors=True)
            return Path(self._made.name)

    def take(self, name: str, offset: int, size: int) -> Bytes:
        """Read a piece of a file; shorter or empty at the end of the file."""
        if offset < 0 or size < 0:
            raise ProtocolError(
                f"worker 0 asked for {size} bytes at {offset} of {name}, expected numbers from 0"
            )
        try:
            with self._path(name).open("rb") as file:
                # allocate no more memory than the file has bytes
                end = os.fstat(file.fileno()).st_size
                start = min(offset, end)
                there = min(size, end - start)
                return np.frombuffer(os.pread(file.fileno(), there, start), np.uint8)
        except OSError as error:
            raise self._failure(name, error) from error

    def put(self, name: str, offset: int, data: NDArray[Any]) -> None:
        """Write a piece of a file; pieces come in order, and a repeated one has no effect."""
        path = self._path(name)
        try:
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                self._check_follows(name, offset, os.fstat(fd).st_size)
                view = np.ascontiguousarray(data).reshape(-1).view(np.uint8).data
                while view:
                    done = os.pwrite(fd, view, offset)
                    offset, view = offset + done, view[done:]
            finally:
                os.close(fd)
        except OSError as error:
            raise self._failure(name, error) from error

    def clear(self) -> None:
        """Remove everything."""
        with self._lock:
            made, self._made = self._made, None
        if made is not None:
            made.cleanup()

    def _path(self, name: str) -> Path:
        if Path(name).name != name or name in ("", ".", "..") or "\0" in name:
            raise ProtocolError(f"worker 0 asked for the file {name!r}, expected a plain name")
        return self.folder / name

    def _check_follows(self, name: str, offset: int, size: int) -> None:
        """Refuse a hole in a file, which could make the file as large as any offset."""
        if not 0 <= offset <= size:
            raise ProtocolError(
                f"worker 0 sent a piece of {name} at {offset}, expected an offset of 0 to {size}: "
                "worker 0 sends pieces in order"
            )

    def _failure(self, name: str, error: OSError) -> CheckpointError:
        return CheckpointError(
            f"server {self._server} could not transfer {name} of its temporary folder: "
            f"{error.strerror or error}"
        )


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


Array = NDArray[Any]
_ALL_ROWS = SnapshotRequest()


@dataclasses.dataclass(frozen=True)
class _CheckpointCut:
    state: StateSnapshot
    #: the last push of each worker that the values contain
    marks: list[Mark]


@dataclasses.dataclass
class _ServerSnapshotJob:
    """The rows of all tables for a snapshot; implements `SnapshotJob`."""

    state: ServerState
    done: Callable[[], None]
    is_awaited: Callable[[], bool]
    rows: StateSnapshot | None = None

    def cut(self) -> None:
        """See `SnapshotJob`."""
        self.rows = self.state.cut(ordered=False)

    def write(self, folder: Path, pause: Pause) -> list[TableFile]:
        """See `SnapshotJob`."""
        assert self.rows is not None, "nothing was cut"
        return self.state.save(self.rows, folder, pause)

    def close(self) -> None:
        """See `SnapshotJob`."""
        self.state.drop_cuts()
        self.done()


@dataclasses.dataclass(frozen=True)
class _Files:
    """The files of a checkpoint in a folder."""

    folder: Path
    state: ServerState

    def check(self, message: Load) -> None:
        """Raise if they are missing, damaged or do not fit."""
        self.state.check(message, self.folder)

    def load(self, message: Load) -> None:
        """Load the rows of this server."""
        self.state.load(message, self.folder)


class CheckpointHandler:
    """Cuts the state between two pushes; the next save or fetch returns the cut."""

    def __init__(
        self,
        server: int,
        state: ServerState,
        pushes: PushHandler,
        values_lock: SharedExclusiveLock,
        deadline_s: float,
    ) -> None:
        self._server = server
        self._deadline_s = deadline_s
        self._state = state
        self._pushes = pushes
        self._values_lock = values_lock
        self._transfer = FileTransfer(server)
        self._lock = threading.Condition()
        self._last: _CheckpointCut | None = None
        self._is_writing = False
        self._waiting = 0

    def cut(self, message: SnapshotRequest) -> Reply:
        """Cut the state: keep its present values, or those that changed, for a save."""
        with self._lock:
            self._wait_until_idle()
            self._last = made = self._cut(message)
        whole, written = self._state.sizes(made.state)
        return SnapshotTaken(made.state.is_delta, made.state.rows, whole, written), []

    def save(self, message: Save) -> Reply:
        """Write the tables of the cut, or the present ones without a cut."""
        write = self._writer_for(message)
        with self._lock:
            self._wait_until_idle()
            made, self._last = self._last or self._cut(), None
            self._is_writing = True
        try:
            return Saved(write(made.state), made.marks), []
        finally:
            self._written()

    def snapshot_job(self) -> _ServerSnapshotJob | None:
        """A snapshot of the tables; None while a checkpoint is cut or written."""
        with self._lock:
            if self._is_writing or self._last is not None:
                return None
            self._is_writing = True
        sweep.get_ready()
        return _ServerSnapshotJob(self._state, self._written, lambda: self._waiting > 0)

    def _written(self) -> None:
        with self._lock:
            self._is_writing = False
            self._lock.notify_all()

    def read_file(self, message: ReadFile) -> Reply:
        """Read a piece of a saved file, without a shared folder."""
        return FileChunk(), [self._transfer.take(message.name, message.offset, message.size)]

    def write_file(self, message: WriteFile, arrays: Sequence[Array]) -> Reply:
        """Write a piece of a file to load, without a shared folder."""
        for array in arrays:
            self._transfer.put(message.name, message.offset, array)
        return Done(), []

    def drop(self) -> Reply:
        """Drop an unsaved cut and the temporary folder."""
        with self._lock:
            self._last = None
            if not self._is_writing:
                self._state.drop_cuts()
                self._transfer.clear()
        return Done(), []

    def fetch(self) -> Reply:
        """The dense values and state of the cut, or the present ones without a cut."""
        with self._lock:
            made = self._last
        state = self._state.dense.state() if made is None else made.state.dense
        return FetchedDense(state.state, state.scalars), [*state.values, *state.arrays]

    def load(self, message: Load) -> Reply:
        """Load the rows of a checkpoint; the server then refuses pushes for the old rows."""
        source = self._source_of(message)
        if message.dry:
            source.check(message)
            return Done(), []
        with self._lock:
            self._wait_until_idle()
            self._is_writing = True
        try:
            with self._values_lock.exclusive():
                self._pushes.begin(message.epoch)
                source.load(message)
        finally:
            self._written()
        return Done(), []

    def restore(self, message: RestoreDense, arrays: Sequence[Array]) -> Reply:
        """Load dense values and state."""
        unpacking = Unpacking(arrays, "dense state")
        values = unpacking.blocks(self._state.blocks())
        state = DenseState(values, message.state, message.scalars, unpacking.rest())
        with self._values_lock.exclusive():
            self._state.restore(state)
        return Done(), []

    def _source_of(self, message: Load) -> _Files | TableObjects:
        """Where the files of a checkpoint are: a URL, a folder, or the temporary one."""
        if is_url(message.folder):
            return TableObjects(message.folder, self._state)
        folder = Path(message.folder) if message.folder else self._transfer.folder
        return _Files(folder, self._state)

    def _writer_for(self, message: Save) -> Callable[[StateSnapshot], list[TableFile]]:
        """Saves where the message says: under a URL, or into the folder of worker 0 or ours."""
        if not is_url(message.folder):
            folder = self._folder_for(message)
            return lambda state: self._state.save(state, folder)
        objects = TableObjects(message.folder, self._state)
        if not objects.has(message.token):
            raise CheckpointError(
                f"server {self._server} does not see the object of worker 0 under "
                f"{message.folder}; give all processes the same AWS_ENDPOINT_URL (or the like), "
                'or use via="worker0"'
            )
        return objects.save

    def _folder_for(self, message: Save) -> Path:
        """The folder to save to: the one shared with worker 0, or the temporary one."""
        if not message.folder:
            self._transfer.clear()
            return self._transfer.folder
        folder = Path(message.folder)
        if not is_file(folder / message.token):
            raise CheckpointError(
                f"server {self._server} does not see the file of worker 0 in {folder}; the folder "
                "of a checkpoint must be the same for all processes, use a shared file system or "
                'via="worker0"'
            )
        return folder

    def _wait_until_idle(self) -> None:
        """Wait until no save, load or snapshot runs: a table has one cut at a time."""
        self._waiting += 1
        try:
            is_idle = self._lock.wait_for(lambda: not self._is_writing, self._deadline_s)
        finally:
            self._waiting -= 1
        if not is_idle:
            raise CheckpointError(
                f"server {self._server} is still writing the previous checkpoint or snapshot after "
                f"{self._deadline_s:g} s; wait until it ends, and check the server's disk"
            )

    def _cut(self, message: SnapshotRequest = _ALL_ROWS) -> _CheckpointCut:
        snapshot.get_ready()
        if message.name:
            unsaved_rows.get_ready()
        with self._values_lock.exclusive():
            # a save without a name has no effect on what later ones know
            knows = bool(message.name) and self._state.knows_since(message.base)
            is_delta = message.delta and knows
            state = self._state.cut(base="" if is_delta else message.name, delta=is_delta)
            return _CheckpointCut(state, self._pushes.progress.marks.marks())
