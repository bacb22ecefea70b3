# SPDX-License-Identifier: Apache-2.0
"""Writes publications as a job does, with rows that a test chooses."""

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from safetensors.numpy import save

from fleetlight.publication import manifest as manifests
from fleetlight.publication.manifest import (
    MANIFEST,
    DenseFile,
    Publication,
    PublicationManifest,
    PublishedTable,
    RowFile,
)
from fleetlight.publication.row_file import write_rows
from fleetlight.store.local import LocalStore

DIM = 3
#: first values are uniform, so that a missing row differs from zeros
TABLE = PublishedTable("emb", DIM, "f32", 7, ("uniform", -1.0, 1.0))
Values = Mapping[int, float]


class Target:
    """A target, and what its table should be: a row has equal values."""

    def __init__(self, folder: Path, table: PublishedTable = TABLE, servers: int = 2) -> None:
        self.store = LocalStore(folder)
        self.folder, self.table, self.servers = folder, table, servers
        self.manifest: PublicationManifest | None = None
        self.expected: dict[int, float] = {}
        self._count = 0

    def base(self, rows: Values, **facts: Any) -> Publication:
        """Publish all rows."""
        self.expected = dict(rows)
        return self._publish(rows, [], "", **facts)

    def delta(self, rows: Values, removed: Iterable[int] = (), **facts: Any) -> Publication:
        """Publish changes."""
        assert self.manifest is not None
        gone = set(removed) - rows.keys()
        self.expected = {i: v for i, v in self.expected.items() if i not in gone} | dict(rows)
        return self._publish(rows, sorted(gone), self.manifest.newest.id, **facts)

    def write(self, manifest: PublicationManifest) -> None:
        """Replace the manifest."""
        self.store.put(MANIFEST, manifests.encode(manifest))

    def edit(self, **facts: Any) -> None:
        """Replace fields of the manifest."""
        assert self.manifest is not None
        self.write(msgspec.structs.replace(self.manifest, **facts))

    def _publish(
        self, rows: Values, removed: list[int], previous: str, epoch: int = 1, time: float = 0.0
    ) -> Publication:
        self._count += 1
        number, name = self._count, f"id{self._count}"
        files = [self._file(name, server, rows, removed) for server in range(self.servers)]
        data = save({"bias": np.full(2, number, np.float32)})
        dense_name = f"{name}/dense.safetensors"
        self.store.put(dense_name, data)
        dense = DenseFile(dense_name, len(data), hashlib.sha256(data).hexdigest())
        made = Publication(name, number, previous, 10 * number, time, dense, files)
        if previous:
            assert self.manifest is not None
            deltas = [*self.manifest.deltas, made]
            self.manifest = msgspec.structs.replace(self.manifest, deltas=deltas, epoch=epoch)
        else:
            self.manifest = PublicationManifest(
                epoch=epoch, every_s=1.0, tables=[self.table], base=made
            )
        self.write(self.manifest)
        return made

    def _file(self, folder: str, server: int, rows: Values, removed: list[int]) -> RowFile:
        mine = np.array([i for i in rows if i % self.servers == server], np.int64)
        gone = np.array([i for i in removed if i % self.servers == server], np.int64)
        values = np.array([rows[i] for i in mine.tolist()], np.float32)[:, None]
        name = f"{folder}/{self.table.name}.server{server}.parquet"
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        grid = np.repeat(values, self.table.dim, axis=1).reshape(-1, self.table.dim)
        counts = write_rows(path, self.table.dim, self.table.form, [(mine, grid)], gone)
        data = path.read_bytes()
        digest = hashlib.sha256(data).hexdigest()
        return RowFile(self.table.name, server, name, len(data), digest, *counts)
