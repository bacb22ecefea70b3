# SPDX-License-Identifier: Apache-2.0
"""What is kept in checkpoints: files of tables, values and state of dense blocks."""

from __future__ import annotations

from typing import ClassVar

import msgspec

from fleetlight.ps.messages.base import MessageBase


class TableFile(msgspec.Struct, frozen=True):
    """What a server wrote of one table."""

    table: int
    name: str
    rows: int
    bytes: int
    sha256: str


class SnapshotRequest(MessageBase, frozen=True, tag="Cut"):
    """Hold on to everything as it is now, for the next Save and Fetch. Answer: Done.

    That is quick, so that training goes on while Save writes what was held on to.
    """

    repeatable: ClassVar[bool] = True


class Save(MessageBase, frozen=True):
    """Write the tables into a folder (of the server), as they are or were cut. Answer: Saved.

    Without a folder they go into a temporary one of the server's own, for Take.
    """

    folder: str
    #: a file name in the folder that worker 0 wrote: proves that the folder is the same
    token: str
    #: each server cuts after the same step in sync mode, between two pushes otherwise
    step: int


class Saved(MessageBase, frozen=True):
    """Arrays: none; `marks` are the sequence numbers applied of each worker."""

    files: list[TableFile]
    marks: list[tuple[int, int, int]]


class ReadFile(MessageBase, frozen=True, tag="Take"):
    """A piece of a file in the server's temporary folder. Answer: FileChunk."""

    repeatable: ClassVar[bool] = True
    name: str
    offset: int
    size: int


class FileChunk(MessageBase, frozen=True, tag="Taken"):
    """Arrays: the bytes, fewer than were asked for at the end of the file."""


class WriteFile(MessageBase, frozen=True, tag="Put"):
    """Arrays: the bytes of a piece of a file, for the server's temporary folder. Answer: Done."""

    repeatable: ClassVar[bool] = True
    name: str
    offset: int


class DropSnapshot(MessageBase, frozen=True, tag="Drop"):
    """Let go of the cut and of the temporary folder, if there are any. Answer: Done."""

    repeatable: ClassVar[bool] = True


class FetchDense(MessageBase, frozen=True, tag="Fetch"):
    """State of the dense blocks, as it is or was cut. Answer: FetchedDense."""

    repeatable: ClassVar[bool] = True


class FetchedDense(MessageBase, frozen=True, tag="Fetched"):
    """Arrays: D; then the tensors of `state`, whose entries are (piece, name, kind).

    Pieces are counted over the server's blocks; `scalars` has one entry for each.
    """

    state: list[tuple[int, str, str]]
    scalars: list[dict[str, bool | int | float | None]]


class Load(MessageBase, frozen=True):
    """Read the rows of this server out of a checkpoint's files. Answer: Done.

    Without a folder the files are those that were Put.
    """

    folder: str
    #: number of the table, name of the file
    files: list[tuple[int, str]]
    epoch: int
    #: size and sha256 of files by name; those with rows of this server are compared
    sums: dict[str, tuple[int, str]] = msgspec.field(default_factory=dict)
    #: only look whether everything is there and fits
    dry: bool = False


class RestoreDense(MessageBase, frozen=True, tag="Restore"):
    """Dense values and state, as Fetched gives them; only the pieces of this server."""

    state: list[tuple[int, str, str]]
    scalars: list[dict[str, bool | int | float | None]]
