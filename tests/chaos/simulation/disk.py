# SPDX-License-Identifier: Apache-2.0
"""A disk in memory: a journal's files, and snapshots. It outlives the process that writes it."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from tests.chaos.simulation.world import Violation, World

from fleetlight.ps.journal.records import LogRecord, Reader
from fleetlight.ps.transport.protocol import MessageCodec


class Disk:
    """What one server keeps."""

    def __init__(self, world: World, name: str) -> None:
        self.world, self.name = world, name
        #: by number of the first record
        self.files: dict[int, bytearray] = {}
        self.rows: dict[int, Any] = {}
        self.manifests: dict[int, list[Any]] = {}
        #: what a process is about to write, and where
        self.writing: tuple[bytearray, bytes] | None = None
        self.life = 0

    def __str__(self) -> str:
        return f"the disk of {self.name}"

    def lose_power_of_writer(self) -> None:
        """The writer died: of what it was writing any part is there."""
        if self.writing is not None:
            file, data = self.writing
            file += data[: self.world.chance.randrange(len(data) + 1)]
            self.writing = None


class MemorySegment:
    """Stands for `Segment`."""

    def __init__(self, disk: Disk, first: int) -> None:
        if disk.files.get(first):
            raise Violation(f"{disk}: file {first} is there already, and not empty")
        self._disk, self.first, self.path = disk, first, f"{disk}, file {first}"
        disk.world.moment()
        disk.files[first] = self._file = bytearray()

    @property
    def size(self) -> int:
        """Bytes of whole records."""
        return len(self._file)

    def write(self, buffers: Sequence[Any]) -> None:
        """Append all; a process may die over it."""
        data = b"".join(buffers)
        self._disk.writing = self._file, data
        self._disk.world.write()
        self._disk.writing = None
        self._file += data
        self._disk.world.moment()

    @property
    def unsynced(self) -> int:
        """The system keeps what it has got."""
        return 0

    def sync(self) -> None:
        """It is kept already."""

    def close(self) -> None:
        """Nothing is appended any more."""


class RowsPlace:
    """Where a snapshot is written."""

    def __init__(self, disk: Disk, first: int) -> None:
        self.disk, self.first = disk, first

    def mkdir(self, exist_ok: bool) -> None:
        """It is there."""


class MemoryFolder:
    """Stands for `Folder`: one start of one job, which takes up what is there."""

    is_resumed, is_own = False, True

    def __init__(self, disk: Disk) -> None:
        disk.life += 1
        self.path = disk
        self.identity = types.SimpleNamespace(life=disk.life)

    @property
    def is_new(self) -> bool:
        """Nothing has been written yet."""
        return bool(self.identity.life == 1)

    def base(self) -> tuple[int, list[Any] | None]:
        """The newest snapshot that is whole, and whose file was begun."""
        found = [first for first in self.path.manifests if first in self.path.files]
        return (max(found), []) if found else (1, None)

    def rows_folder(self, first: int) -> RowsPlace:
        """Where the rows are."""
        return RowsPlace(self.path, first)

    def complete(self, first: int, files: list[Any]) -> None:
        """They count from now on."""
        self.path.world.moment()
        self.path.manifests[first] = files
        self.path.world.moment()

    def log_bytes(self) -> int:
        """How much a life that begins now has to read back."""
        first, _ = self.base()
        return sum(len(file) for start, file in self.path.files.items() if start >= first)

    def drop_before(self, first: int) -> None:
        """What lies before a snapshot is not needed any more."""
        for start in sorted(self.path.files):
            if start < first:
                del self.path.files[start]
                self.path.world.moment()
        for kept in (self.path.manifests, self.path.rows):
            for start in [one for one in kept if one < first]:
                del kept[start]

    def drop_incomplete(self) -> None:
        """Snapshots that somebody died over."""
        for start in [one for one in self.path.rows if one not in self.path.manifests]:
            del self.path.rows[start]

    def end(self, *, ended: bool = False) -> None:
        """`clear` says it, too; `ended` is for a launch that comes later, and here is none."""

    def clear(self) -> None:
        """Nothing of it is needed any more."""
        self.path.files.clear()

    def close(self) -> None:
        """Let others have it."""


def memory_history(
    disk: Disk, codec: MessageCodec[Any], first: int, say: Callable[..., None]
) -> Iterator[LogRecord[Any]]:
    """Stands for `history`: only the very end may be torn, since nobody damages this disk."""
    files = sorted((start, file) for start, file in disk.files.items() if start >= first)
    expected = first
    for start, file in files:
        if start != expected:
            raise Violation(f"{disk}: records {expected} to {start - 1} are missing")
        reader = Reader(codec, np.frombuffer(bytes(file), np.uint8), start)
        for record in reader:
            expected = record.number + 1
            yield record
        if reader.gap is not None:
            if reader.gap.followed_by is not None or file is not files[-1][1]:
                raise Violation(f"{disk}: file {start} is damaged: {reader.gap}")
            del file[reader.gap.at :]
