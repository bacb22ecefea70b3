# SPDX-License-Identifier: Apache-2.0
"""`LayerCache`: the layers of published tables in a folder of this machine.

One process builds a layer, under a lock; the others map its file.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from fleetlight.errors import ConfigError, DeadlineError, PublicationError
from fleetlight.files.atomic import replacing
from fleetlight.files.lock import FileLock
from fleetlight.kernels.rows.layered_rows import LOWER_LOAD, UPPER_LOAD
from fleetlight.publication.manifest import (
    DenseFile,
    Publication,
    PublicationManifest,
    PublishedTable,
    RowFile,
)
from fleetlight.publication.row_file import Ids, read_rows
from fleetlight.serve.layer_file import Layer, LayerWriter, open_layer
from fleetlight.serve.view import ModelView, TableView
from fleetlight.store import ObjectStore

_LOCK = "build.lock"
#: how the names of folders begin that hold a published file while it is read
_FETCHES = "fetch-"
_POLL_S = 0.02
#: how long a process waits for another one that builds
_BUILD_S = 1800.0
#: how long a layer stays that no process here needs
_GRACE_S = 60.0
_BLOCK = 16 << 20
_NO_IDS: Ids = np.empty(0, np.int64)


class LayerCache:
    """The layers of one target."""

    def __init__(self, store: ObjectStore, root: Path | None) -> None:
        self._store = store
        top = _private_folder() if root is None else root
        name = hashlib.sha256(store.url.encode()).hexdigest()[:16]
        self.folder = top / name
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        #: files of the last manifest
        self._before: set[str] = set()

    def view(self, manifest: PublicationManifest) -> ModelView:
        """Map all layers of a manifest, and build those that no process has built."""
        view = self._mapped(manifest)
        if view is None:
            with self._building():
                view = self._mapped(manifest)
                if view is None:
                    self._build(manifest)
                    view = self._mapped(manifest)
                self._delete_old(manifest)
        if view is None:
            raise PublicationError(
                f"{self.folder}: another program deletes the layers of this reader; give it a "
                "folder of its own with cache="
            )
        self._before = _names(manifest)
        return view

    def _mapped(self, manifest: PublicationManifest) -> ModelView | None:
        """The view, if all files exist."""
        dense = self.folder / _dense_name(manifest)
        if not _is_whole(dense, manifest.newest.dense):
            return None
        tables = {}
        for entry in manifest.tables:
            base = self._layer(manifest.base, entry)
            changed = self._layer(manifest.newest, entry) if manifest.deltas else None
            if base is None or (changed is None and manifest.deltas):
                return None
            tables[entry.name] = TableView(entry, base, changed)
        with contextlib.suppress(FileNotFoundError):
            return ModelView(manifest, tables, dense)
        return None

    def _layer(self, publication: Publication, entry: PublishedTable) -> Layer | None:
        return open_layer(self.folder / _layer_name(publication, entry), entry.dim)

    def _build(self, manifest: PublicationManifest) -> None:
        for entry in manifest.tables:
            if self._layer(manifest.base, entry) is None:
                self._build_layer(manifest.base, entry, [manifest.base], None)
            if manifest.deltas and self._layer(manifest.newest, entry) is None:
                start, copied = self._last_built(manifest, entry)
                self._build_layer(manifest.newest, entry, manifest.deltas[start:], copied)
        newest = manifest.newest
        with self._fetched(newest.dense) as path, self._new(_dense_name(manifest)) as new:
            os.rename(path, new)

    def _last_built(
        self, manifest: PublicationManifest, entry: PublishedTable
    ) -> tuple[int, Layer | None]:
        """How many deltas the newest layer has that was built before, and the layer."""
        for count in range(len(manifest.deltas) - 1, 0, -1):
            layer = self._layer(manifest.deltas[count - 1], entry)
            if layer is not None:
                return count, layer
        return 0, None

    def _build_layer(
        self,
        named: Publication,
        entry: PublishedTable,
        publications: Sequence[Publication],
        copied: Layer | None,
    ) -> None:
        files = [one.files_of(entry.name) for one in publications]
        more = sum(file.rows + file.removed for some in files for file in some)
        with self._new(_layer_name(named, entry)) as path:
            load = UPPER_LOAD if named.previous else LOWER_LOAD
            writer = LayerWriter(path, entry.dim, more, load, copied)
            for publication, some in zip(publications, files, strict=True):
                # the ids of a delta; a base begins an empty layer, which has one row for each id
                seen: list[Ids] | None = [] if publication.previous else None
                for file in some:
                    self._add(writer, entry, file, seen)
                if seen is None:
                    distinct, count = writer.used, sum(file.rows for file in some)
                else:
                    distinct, count = (
                        len(np.unique(np.concatenate([_NO_IDS, *seen]))),
                        sum(map(len, seen)),
                    )
                if distinct != count:
                    raise PublicationError(
                        f"{self._store.url}: {count - distinct} ids of table {entry.name!r} are in "
                        f"publication {publication.number} twice; let the job publish again"
                    )
            writer.finish()

    def _add(
        self, writer: LayerWriter, entry: PublishedTable, file: RowFile, seen: list[Ids] | None
    ) -> None:
        """Add a file; `seen` gets its ids."""
        rows = removed = 0
        with self._fetched(file) as path:
            for piece in read_rows(path, entry.dim, entry.form):
                writer.add(piece)
                removed += int(piece.removed.sum())
                rows += len(piece.ids)
                if seen is not None:
                    seen.append(piece.ids)
        if (rows - removed, removed) != (file.rows, file.removed):
            raise PublicationError(
                f"{self._store.url}/{file.name} has {rows - removed} rows and removes {removed} "
                f"ids, expected {file.rows} and {file.removed}; let the job publish again"
            )

    @contextlib.contextmanager
    def _fetched(self, file: RowFile | DenseFile) -> Iterator[Path]:
        """A copy of a published file, whose checksum was compared."""
        digest = hashlib.sha256()
        there = self._store.head(file.name)
        if there is not None and there.size != file.bytes:
            # a store would wait for the bytes that are missing
            raise PublicationError(
                f"{self._store.url}/{file.name} is damaged: it has {there.size} bytes, expected "
                f"{file.bytes}; let the job publish again"
            )
        with tempfile.TemporaryDirectory(dir=self.folder, prefix=_FETCHES) as folder:
            path = Path(folder, "file")
            with path.open("wb") as copy:
                for start in range(0, file.bytes, _BLOCK):
                    span = start, min(start + _BLOCK, file.bytes)
                    [data] = self._store.get_ranges(file.name, [span])
                    digest.update(data)
                    copy.write(data)
            if digest.hexdigest() != file.sha256:
                raise PublicationError(
                    f"{self._store.url}/{file.name} is damaged: its sha256 is "
                    f"{digest.hexdigest()}, expected {file.sha256}; let the job publish again"
                )
            yield path

    def _new(self, name: str) -> contextlib.AbstractContextManager[Path]:
        return replacing(self.folder / name, unique=True)

    @contextlib.contextmanager
    def _building(self) -> Iterator[None]:
        """Hold the lock of the folder."""
        until = time.monotonic() + _BUILD_S
        with FileLock(self.folder / _LOCK, 0o600) as lock:
            while not lock.acquire():
                if time.monotonic() > until:
                    raise DeadlineError(
                        f"{self.folder}: waited {_BUILD_S:g} s for {lock.holder() or 'a process'}, "
                        "which builds the rows of a publication; end it, or choose another cache="
                    )
                time.sleep(_POLL_S)
            yield

    def _delete_old(self, manifest: PublicationManifest) -> None:
        """Delete layers that this process has not needed for two publications.

        A process that is slower builds again what it misses; mapped files stay mapped.
        """
        needed = _names(manifest) | self._before | {_LOCK}
        newest = (self.folder / _dense_name(manifest)).stat().st_mtime
        for path in self.folder.iterdir():
            with contextlib.suppress(OSError):
                if path.name.startswith(_FETCHES):
                    # of a process that was killed: this one holds the lock, and fetches nothing now
                    shutil.rmtree(path)
                elif path.is_file() and path.name not in needed:
                    # the lock is held, so no process is writing a temporary file
                    is_temporary = path.name.endswith(".new")
                    if is_temporary or newest - path.stat().st_mtime > _GRACE_S:
                        path.unlink()


def _names(manifest: PublicationManifest) -> set[str]:
    """The names of the files in the folder that a manifest needs."""
    layers = {
        _layer_name(one, entry)
        for entry in manifest.tables
        for one in (manifest.base, manifest.newest)
    }
    return layers | {_dense_name(manifest)}


def _layer_name(publication: Publication, entry: PublishedTable) -> str:
    return f"{publication.id}-{entry.name}.layer"


def _dense_name(manifest: PublicationManifest) -> str:
    return f"{manifest.newest.id}.safetensors"


def _is_whole(path: Path, file: DenseFile) -> bool:
    """False where there is no such file, or a power failure cut it off."""
    try:
        return path.stat().st_size == file.bytes
    except FileNotFoundError:
        return False


def _private_folder() -> Path:
    """A folder of this user alone in the system's folder for temporary files."""
    folder = Path(tempfile.gettempdir(), f"fleetlight-serve-{os.getuid()}")
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise ConfigError(
            f"{folder} belongs to another user, or others may write to it; name a folder with "
            "Reader(url, cache=...)"
        )
    return folder
