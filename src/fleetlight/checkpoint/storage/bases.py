# SPDX-License-Identifier: Apache-2.0
"""`Bases`: what the next save into a folder or under a URL needs, if it is a delta.

The manifest alone says it, so no process has to remember earlier saves. A manifest names a base by
which servers know what changed since. A base that is not whole any more is no base.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from fleetlight.checkpoint.storage.generations import Directory
from fleetlight.checkpoint.storage.manifest import (
    FORMAT,
    BaseEntry,
    Manifest,
    TableFileEntry,
    folder_of,
)
from fleetlight.checkpoint.storage.sources import Source, source_of
from fleetlight.errors import CheckpointError


@dataclasses.dataclass(frozen=True)
class SavedBase:
    """A generation with all rows, and the files of its tables by their names."""

    entry: BaseEntry
    tables: Mapping[str, Sequence[TableFileEntry]]
    #: whether the next save is to be a base
    is_due: bool


@dataclasses.dataclass(frozen=True)
class Bases:
    """The saves into one folder or under one URL, of which every few have all rows of tables."""

    location: Directory
    every: int

    def next(self) -> SavedBase | None:
        """The base that the next save may need; None: none is there."""
        source = source_of(self.location)
        try:
            manifest = source.manifest(Manifest, FORMAT)
            entry = _base_of(manifest)
            if entry is None or not _is_whole(source, entry):
                return None
        except CheckpointError:
            # there is no checkpoint, or none that can be read: the save itself says what is wrong
            return None
        tables = {
            table.name: [file for file in table.files if not file.part] for table in manifest.tables
        }
        is_due = manifest.generation + 1 - entry.generation >= self.every
        return SavedBase(entry, tables, is_due)


def _base_of(manifest: Manifest) -> BaseEntry | None:
    """The base of a generation, or itself if it may be one."""
    if isinstance(manifest.base, BaseEntry):
        return manifest.base
    if not isinstance(manifest.name, str):
        return None
    names = {file.name for table in manifest.tables for file in table.files}
    return BaseEntry(
        generation=manifest.generation,
        folder=folder_of(manifest),
        name=manifest.name,
        files=[entry for entry in manifest.files if entry.name in names],
    )


def _is_whole(source: Source, base: BaseEntry) -> bool:
    """Whether all files are there with their sizes; their bytes are verified when they are read."""
    there = source.sizes(base.folder)
    return all(there.get(entry.name) == entry.bytes for entry in base.files)
