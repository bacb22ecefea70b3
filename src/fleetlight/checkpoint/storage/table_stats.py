# SPDX-License-Identifier: Apache-2.0
"""What `fleetlight table stats` shows of the tables of a checkpoint. It needs no torch.

Only headers, the index of buckets and the counts are read, not the rows. Rows stand in the order of
their hashed ids, so the first rows of each file are a random sample of its rows.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleetlight.checkpoint.storage.generations import Directory
from fleetlight.checkpoint.storage.manifest import (
    REMOVED,
    Manifest,
    TableEntry,
    TableFileEntry,
    all_files,
    folder_with,
)
from fleetlight.errors import CheckpointError, CorruptCheckpointError, StoreError
from fleetlight.store import ObjectStore, joined, store_at

#: the columns of `meta` in a file
SHOWS, CLICKS, UNSEEN, ADMITTED, LAST = range(5)
#: the counts of so many rows of a table are read
MAX_ROWS = 4_000_000
PERCENTS = (0, 10, 50, 90, 99, 100)
_HEAD = 1 << 16

Counts = NDArray[np.float32]


@dataclasses.dataclass(frozen=True)
class ServerPart:
    """The rows that one server wrote."""

    server: int
    rows: int
    bytes: int


@dataclasses.dataclass(frozen=True)
class TableStats:
    """A table of a checkpoint."""

    entry: TableEntry
    servers: list[ServerPart]
    #: how many rows each bucket of ids has; None: the files have no index
    buckets: NDArray[np.int64] | None
    #: the rows whose counts were read, and by name their values at `PERCENTS`
    sampled: int
    quantiles: dict[str, list[float]]
    #: the part of the rows whose ids are admitted; None where all are
    admitted: float | None
    #: of a delta, whose other statistics are those of its base: changed rows, removed ids and bytes
    changed: tuple[int, int, int] | None

    @property
    def rows(self) -> int:
        """The rows that the servers wrote, those of the base of a delta."""
        return sum(part.rows for part in self.servers)

    @property
    def bytes(self) -> int:
        """Bytes of its files."""
        return sum(part.bytes for part in self.servers)


def table_stats(location: Directory, manifest: Manifest, table: TableEntry) -> TableStats:
    """Read the statistics of a table of one generation."""
    sizes = {name: file.bytes for name, file in all_files(manifest).items()}
    whole = [part for part in table.files if not part.part]
    total = sum(part.rows for part in whole)
    found, buckets = [], None
    try:
        store = store_at(os.fspath(location))
        for part in whole:
            name = joined(folder_with(manifest, part.name), part.name)
            file = _TableFile(store, name, sizes[part.name])
            index = file.buckets()
            if index is not None:
                buckets = index if buckets is None else buckets + index
            found.append(file.sample(max(1, MAX_ROWS * part.rows // max(1, total))))
    except StoreError as error:
        raise CheckpointError(str(error)) from error
    counts = _joint(found)
    admitted = counts.pop("admitted", None)
    return TableStats(
        table,
        list(_by_server(whole, sizes)),
        buckets,
        0 if admitted is None else len(admitted),
        {name: np.percentile(values, PERCENTS).tolist() for name, values in counts.items()},
        None if admitted is None or not _filters(table) else float(np.mean(admitted > 0)),
        _changed(table.files, sizes),
    )


def _changed(files: list[TableFileEntry], sizes: Mapping[str, int]) -> tuple[int, int, int] | None:
    later = [file for file in files if file.part]
    if not later:
        return None
    removed = sum(file.rows for file in later if file.part == REMOVED)
    rows = sum(file.rows for file in later) - removed
    return rows, removed, sum(sizes[file.name] for file in later)


def _by_server(files: list[TableFileEntry], sizes: Mapping[str, int]) -> Iterator[ServerPart]:
    for server in sorted({file.server for file in files}):
        mine = [file for file in files if file.server == server]
        yield ServerPart(
            server, sum(file.rows for file in mine), sum(sizes[file.name] for file in mine)
        )


def _filters(table: TableEntry) -> bool:
    """Whether rows wait for an admission."""
    return table.entry is not None and table.entry[0] == "count"


def _joint(samples: list[dict[str, Counts]]) -> dict[str, Counts]:
    """The counts of all files, by name; {} without rows."""
    samples = [sample for sample in samples if len(sample.get("admitted", ()))]
    names = dict.fromkeys(name for sample in samples for name in sample)
    return {name: np.concatenate([s[name] for s in samples if name in s]) for name in names}


class _TableFile:
    """One file of a table, of which only some ranges are read."""

    def __init__(self, store: ObjectStore, name: str, size: int) -> None:
        self._store, self._name = store, name
        try:
            head = bytes(self._read(0, min(size, _HEAD)))
            self._start = 8 + int.from_bytes(head[:8], "little")
            if self._start > len(head):
                head = bytes(self._read(0, min(size, self._start)))
            header: dict[str, Any] = json.loads(head[8 : self._start])
            self._about: dict[str, str] = header.pop("__metadata__", {})
            self._tensors = {name: (e["shape"], e["data_offsets"]) for name, e in header.items()}
        except (ValueError, KeyError, TypeError) as error:
            raise CorruptCheckpointError(
                f"{joined(store.url, name)} is not the file of a table: {error}; load another "
                "checkpoint"
            ) from error

    def buckets(self) -> NDArray[np.int64] | None:
        """The number of rows in each bucket."""
        if "buckets" not in self._tensors:
            return None
        _, (start, stop) = self._tensors["buckets"]
        return np.diff(np.frombuffer(self._data(start, stop), "<i8")).astype(np.int64)

    def sample(self, most: int) -> dict[str, Counts]:
        """The counts of the first rows, by name."""
        if "meta" not in self._tensors:
            return {}
        (rows, width), (start, _) = self._tensors["meta"]
        rows = min(rows, most)
        flat = np.frombuffer(self._data(start, start + 4 * rows * width), "<f4")
        meta: Counts = flat.reshape(rows, width)
        found = {
            "shows": meta[:, SHOWS],
            "clicks": meta[:, CLICKS],
            "unseen days": meta[:, UNSEEN],
            "admitted": meta[:, ADMITTED],
        }
        if width > LAST and "pushes" in self._about:
            found["pushes since its last"] = np.float32(self._about["pushes"]) - meta[:, LAST]
        return found

    def _data(self, start: int, stop: int) -> bytes:
        return bytes(self._read(self._start + start, self._start + stop)) if start < stop else b""

    def _read(self, start: int, stop: int) -> Any:
        [data] = self._store.get_ranges(self._name, [(start, stop)])
        return data
