# SPDX-License-Identifier: Apache-2.0
"""Messages by which worker 0 publishes what the servers have."""

from __future__ import annotations

from typing import ClassVar

import msgspec

from fleetlight.ps.messages.base import MessageBase


class PublicationRequest(MessageBase, frozen=True):
    """Ask what changed since a publication; changes are marked from now on. Reply: Changed.

    A cut that became no publication ends; its changes belong to the next one. Changes of other
    tables are no longer marked.
    """

    repeatable: ClassVar[bool] = True
    tables: list[int]
    #: the last publication that is complete; "" if there is none
    published: str


class Changed(MessageBase, frozen=True):
    """By table of the request: rows that changed or were removed, and all rows."""

    #: False: the server does not know all changes since, as after a restart
    is_complete: bool
    changed: list[int]
    rows: list[int]
    #: bytes of all tables of the request
    bytes: int


class PublicationCut(MessageBase, frozen=True):
    """Keep the present rows for PublicationWrite. Reply: PublicationTaken. A cut is quick."""

    publication: str
    tables: list[int]
    #: the publication whose changes since are published; "": all rows are
    since: str


class PublicationTaken(MessageBase, frozen=True):
    """Arrays: D, at the cut."""


class PublicationWrite(MessageBase, frozen=True):
    """Write the cut into files. Reply: PublicationWritten."""

    publication: str
    #: the store, and the names in it before those of tables
    url: str
    prefix: str
    #: by table of the cut: the form of its rows
    forms: list[str]


class PublishedFile(msgspec.Struct, frozen=True):
    """The file that a server wrote for one table."""

    table: int
    name: str
    bytes: int
    sha256: str
    rows: int
    removed: int


class PublicationWritten(MessageBase, frozen=True):
    """The files, in the order of the tables."""

    files: list[PublishedFile]
