# SPDX-License-Identifier: Apache-2.0
"""`CheckpointHandler`: a server's part in saving and loading a checkpoint during training."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from fleetlight.errors import CheckpointError
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
from fleetlight.ps.server.checkpoints.file_transfer import FileTransfer
from fleetlight.ps.server.checkpoints.table_objects import TableObjects
from fleetlight.ps.server.shared_exclusive_lock import SharedExclusiveLock
from fleetlight.ps.server.steps.pushes import PushHandler
from fleetlight.ps.server.steps.request_dedup import Reply
from fleetlight.ps.tables import ordered_snapshot as snapshot
from fleetlight.ps.tables import unordered_snapshot as sweep
from fleetlight.ps.tables.dense_state import DenseState
from fleetlight.ps.tables.saving import unsaved_rows
from fleetlight.ps.tables.server_state import ServerState, StateSnapshot, is_file
from fleetlight.ps.tables.table_file import Pause
from fleetlight.ps.tables.unpacking import Unpacking
from fleetlight.store import is_url

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
