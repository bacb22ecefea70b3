# SPDX-License-Identifier: Apache-2.0
"""A disk in memory: a journal's files, and snapshots. It outlives the process that writes it."""

import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from tests.chaos.simulation.world import Violation, World

from fleetlight.ps.journal.records import LogRecord, RecordReader
from fleetlight.ps.transport.protocol import MessageCodec


class Disk:
    """The durable state of one server."""

    def __init__(self, world: World, name: str) -> None:
        self.world, self.name = world, name
        #: by number of the first record
        self.files: dict[int, bytearray] = {}
        self.rows: dict[int, Any] = {}
        self.manifests: dict[int, list[Any]] = {}
        #: the bytes that a process is about to write, and their place
        self.writing: tuple[bytearray, bytes] | None = None
        self.incarnation = 0

    def __str__(self) -> str:
        return f"the disk of {self.name}"

    def lose_power_of_writer(self) -> None:
        """The writer died: any part of its last write is on disk."""
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
        """Append all; the process may die in it."""
        data = b"".join(buffers)
        self._disk.writing = self._file, data
        self._disk.world.write()
        self._disk.writing = None
        self._file += data
        self._disk.world.moment()

    @property
    def unsynced(self) -> int:
        """Give the bytes to the system."""
        return 0

    def sync(self) -> None:
        """Do nothing: all bytes are on disk."""

    def close(self) -> None:
        """End the segment."""


class RowsPlace:
    """The writer of a snapshot."""

    def __init__(self, disk: Disk, first: int) -> None:
        self.disk, self.first = disk, first

    def mkdir(self, exist_ok: bool) -> None:
        """Put it on disk."""


class MemoryFolder:
    """Stands for `Folder`: one start of one job, which loads the state on disk."""

    is_resumed, is_own = False, True

    def __init__(self, disk: Disk) -> None:
        disk.incarnation += 1
        self.path = disk
        self.identity = types.SimpleNamespace(incarnation=disk.incarnation)

    @property
    def is_new(self) -> bool:
        """True before the first write."""
        return bool(self.identity.incarnation == 1)

    def base(self) -> tuple[int, list[Any] | None]:
        """The newest complete snapshot whose file was begun."""
        found = [first for first in self.path.manifests if first in self.path.files]
        return (max(found), []) if found else (1, None)

    def rows_folder(self, first: int) -> RowsPlace:
        """The place of the rows."""
        return RowsPlace(self.path, first)

    def complete(self, first: int, files: list[Any]) -> None:
        """Let them count from now on."""
        self.path.world.moment()
        self.path.manifests[first] = files
        self.path.world.moment()

    def log_bytes(self) -> int:
        """The bytes that a new incarnation would replay."""
        first, _ = self.base()
        return sum(len(file) for start, file in self.path.files.items() if start >= first)

    def drop_before(self, first: int) -> None:
        """Delete the records before a snapshot."""
        for start in sorted(self.path.files):
            if start < first:
                del self.path.files[start]
                self.path.world.moment()
        for kept in (self.path.manifests, self.path.rows):
            for start in [one for one in kept if one < first]:
                del kept[start]

    def drop_incomplete(self) -> None:
        """Delete snapshots whose writer died."""
        for start in [one for one in self.path.rows if one not in self.path.manifests]:
            del self.path.rows[start]

    def end(self, *, ended: bool = False) -> None:
        """Do nothing: it is for a later launch, and here is none."""

    def clear(self) -> None:
        """Delete all of it."""
        self.path.files.clear()

    def close(self) -> None:
        """Unlock it."""


def memory_history(
    disk: Disk, codec: MessageCodec[Any], first: int, say: Callable[..., None]
) -> Iterator[LogRecord[Any]]:
    """Stands for `history`: only the end may be torn, since nothing damages this disk."""
    files = sorted((start, file) for start, file in disk.files.items() if start >= first)
    expected = first
    for start, file in files:
        if start != expected:
            raise Violation(f"{disk}: records {expected} to {start - 1} are missing")
        reader = RecordReader(codec, np.frombuffer(bytes(file), np.uint8), start)
        for record in reader:
            expected = record.number + 1
            yield record
        if reader.gap is not None:
            if reader.gap.followed_by is not None or file is not files[-1][1]:
                raise Violation(f"{disk}: file {start} is damaged: {reader.gap}")
            del file[reader.gap.at :]
