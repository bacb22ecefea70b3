# SPDX-License-Identifier: Apache-2.0
"""`ObjectStore`: what every place for objects can do."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Protocol

Data = bytes | bytearray | memoryview
#: the first byte, and the one after the last
Span = tuple[int, int]


@dataclasses.dataclass(frozen=True)
class Entry:
    """An object without its content."""

    #: relative to the URL of the store, with `/` between folders
    name: str
    size: int
    #: changes whenever the object is replaced: the etag, or what the place has instead
    version: str


@dataclasses.dataclass(frozen=True)
class Object(Entry):
    """An object with its content."""

    data: Data


class ObjectStore(Protocol):
    """Objects under one URL. All methods may be called by several threads.

    An object is whole or absent: a reader never sees a part of a write. Each method retries what
    may pass, such as a server error or a cut connection, until a deadline. Then it raises a
    `StoreError` that names URL, operation, cause and remedy. A name without an object raises
    `MissingObjectError`.
    """

    @property
    def url(self) -> str:
        """The URL, for messages and for other processes; it never has credentials."""

    @property
    def is_exact(self) -> bool:
        """True if `create` and `swap` are atomic against writers in other processes."""

    def head(self, name: str) -> Entry | None:
        """An object without its content; None if there is none."""

    def get(self, name: str) -> Object:
        """A whole object; a large one is read in parallel ranges of one version."""

    def get_ranges(self, name: str, spans: Sequence[Span]) -> list[Data]:
        """Some ranges of an object, in parallel; each must be inside the object."""

    def put(self, name: str, data: Data | Path) -> str:
        """Write an object, or replace it; returns its version. A large one is sent in parallel."""

    def create(self, name: str, data: Data) -> str | None:
        """Write an object if there is none of this name; returns its version, None if there is.

        After a lost reply, equal content means that this call wrote it. So let `data` differ from
        what other writers write.
        """

    def swap(self, name: str, data: Data, version: str) -> str | None:
        """Replace an object if it has this version; returns the new one, None if it has another.

        `data` is as in `create`.
        """

    def list(self, prefix: str = "") -> list[Entry]:
        """All objects whose names start with `prefix`, by name."""

    def delete(self, names: Iterable[str]) -> None:
        """Delete objects; names without an object are skipped."""
