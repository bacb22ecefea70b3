# SPDX-License-Identifier: Apache-2.0
"""Messages that save and load checkpoints: table files, dense values and optimizer state."""

from __future__ import annotations

from typing import ClassVar

import msgspec

from fleetlight.ps.messages.base import MessageBase


class TableFile(msgspec.Struct, frozen=True):
    """The file that a server wrote for one table."""

    table: int
    name: str
    rows: int
    bytes: int
    sha256: str
    #: the first bucket in it, and the one after the last; None: all of the server
    buckets: tuple[int, int] | None = None
    #: "delta": rows that replace those of the base; "removed": only ids; "": a whole table
    part: str = ""


class SnapshotRequest(MessageBase, frozen=True):
    """Take a snapshot for the next Save and FetchDense. Reply: SnapshotTaken.

    A snapshot is quick; training continues while Save writes it.
    """

    repeatable: ClassVar[bool] = True
    #: the name of a save with all rows that may be a base: changes after it are marked from now on
    name: str = ""
    #: the base that the checkpoint has, which says which earlier save succeeded
    base: str = ""
    #: only the changes since the base are wanted
    delta: bool = False


class SnapshotTaken(MessageBase, frozen=True):
    """What the snapshot has."""

    #: False: all rows; the server does not know all changes since the base, as after a restart
    is_delta: bool
    #: by table: all rows, also those that only the base has
    rows: list[int]
    #: bytes of all rows in files, and of what this save writes
    bytes: int
    written: int


class Save(MessageBase, frozen=True):
    """Write the tables, or their snapshot, into a folder of the server or a URL. Reply: Saved.

    Without a folder the server writes them into a temporary one, for ReadFile.
    """

    folder: str
    #: name of a file that worker 0 wrote into the folder: proves that both see the same folder
    token: str
    #: sync mode: all servers take the snapshot after this step; otherwise between two pushes
    step: int


class Saved(MessageBase, frozen=True):
    """Arrays: none; `marks` are the high-water marks of the workers."""

    files: list[TableFile]
    marks: list[tuple[int, int, int]]


class ReadFile(MessageBase, frozen=True):
    """Read a part of a file in the server's temporary folder. Reply: FileChunk."""

    repeatable: ClassVar[bool] = True
    name: str
    offset: int
    size: int


class FileChunk(MessageBase, frozen=True):
    """Arrays: the bytes; fewer than requested at the end of the file."""


class WriteFile(MessageBase, frozen=True):
    """Write a part of a file into the server's temporary folder. Arrays: bytes. Reply: Done."""

    repeatable: ClassVar[bool] = True
    name: str
    offset: int


class DropSnapshot(MessageBase, frozen=True):
    """Drop the snapshot and the temporary folder, if any. Reply: Done."""

    repeatable: ClassVar[bool] = True


class FetchDense(MessageBase, frozen=True):
    """Return the state of the dense blocks, or of their snapshot. Reply: FetchedDense."""

    repeatable: ClassVar[bool] = True


class FetchedDense(MessageBase, frozen=True):
    """Arrays: D; then the tensors of `state`, whose entries are (slice, name, kind).

    Slices are numbered over the server's blocks; `scalars` has one entry for each slice.
    """

    state: list[tuple[int, str, str]]
    scalars: list[dict[str, bool | int | float | None]]


class Load(MessageBase, frozen=True):
    """Read the rows of this server from the files of a checkpoint, or its URL. Reply: Done.

    Without a folder the files are those of WriteFile.
    """

    folder: str
    #: number of the table, name of the file
    files: list[tuple[int, str]]
    epoch: int
    #: size and sha256 of files by name; the server checks those with rows of its own
    sums: dict[str, tuple[int, str]] = msgspec.field(default_factory=dict)
    #: only check that all files exist and match the plan
    dry: bool = False
    #: the folder or URL of the files that the base has, and their names
    base: str = ""
    base_files: list[str] = msgspec.field(default_factory=list)


class RestoreDense(MessageBase, frozen=True):
    """Load dense values and state in the form of FetchedDense; only slices of this server."""

    state: list[tuple[int, str, str]]
    scalars: list[dict[str, bool | int | float | None]]
