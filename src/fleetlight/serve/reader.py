# SPDX-License-Identifier: Apache-2.0
"""`Reader`: follows the publications of a job, and looks up their newest rows."""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fleetlight.errors import ConfigError, DeadlineError, MissingObjectError, PublicationError
from fleetlight.files.atomic import replacing
from fleetlight.files.lock import FileLock
from fleetlight.kernels.rows.layered_rows import LOWER_LOAD, UPPER_LOAD
from fleetlight.observe.log import logger
from fleetlight.publication.manifest import (
    MANIFEST,
    DenseFile,
    Publication,
    PublicationManifest,
    PublishedTable,
    RowFile,
    check_newer,
    decode,
)
from fleetlight.publication.row_file import Ids, arrow, read_rows
from fleetlight.serve.layer_file import Layer, LayerWriter, open_layer
from fleetlight.serve.view import ModelView, TableView
from fleetlight.store import Location, ObjectStore, absolute, store_at

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


#: how often a reader that waits for the first publication looks
_WAIT_POLL_S = 0.2


def _check(name: str, seconds: object, *, above: bool = False) -> None:
    good = isinstance(seconds, (int, float)) and math.isfinite(seconds) and seconds >= 0
    if not good or (above and not seconds):
        least = "above 0" if above else "of 0 or more"
        raise ConfigError(f"Reader: got {name}={seconds!r}, expected a number of seconds {least}")


class Reader:
    """Looks up rows of the newest publication. All methods may be called by several threads.

    A thread looks for new publications. Rows change all at once, between two lookups; use `view`
    for several lookups of the same model. A publication that cannot be read is logged, `error` has
    the reason, and lookups continue with the one before it. Use it as a context manager, or call
    `close`.

    Args:
        url: the folder or URL of `fleet.publish`.
        period_s: seconds between two looks for a new publication.
        wait_s: seconds to wait for the first publication.
        cache: a folder for the rows, which all processes on this machine map; by default one in the
            system's folder for temporary files.
        follow: False looks for publications in `refresh` only.

    Raises:
        PublicationError: there is no publication, or it cannot be read.

    Example:
        >>> from fleetlight.serve import Reader
        >>> fleet.init()
        >>> model = fleet.distributed_model(fleet.nn.SparseEmbedding(2, table="emb"))
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> optimizer = fleet.distributed_optimizer(optimizer)
        >>> fleet.init_worker()
        >>> _ = fleet.publish("published").publish_now()
        >>> with Reader("published", cache="cache") as reader:
        ...     reader.lookup("emb", [7, 9]).shape
        (2, 2)
    """

    def __init__(
        self,
        url: Location,
        *,
        period_s: float = 0.5,
        wait_s: float = 60.0,
        cache: str | os.PathLike[str] | None = None,
        follow: bool = True,
    ) -> None:
        """Read the newest publication; wait for the first one for up to `wait_s` seconds.

        Look for new ones each `period_s` seconds, or without `follow` only in `refresh`. `cache`
        is a folder for the rows, which all processes on this machine map; without it they share
        one in the system's folder for temporary files.
        """
        arrow()
        _check("period_s", period_s, above=True)
        _check("wait_s", wait_s)
        self._store = store_at(absolute(url))
        self._cache = LayerCache(self._store, None if cache is None else Path(cache))
        self._where = f"{self._store.url}/{MANIFEST}"
        self._refreshing = threading.Lock()
        self._version = ""
        self._manifest: PublicationManifest | None = None
        #: why the newest publication could not be read; None if it was
        self.error: Exception | None = None
        self._view = self._first(wait_s)
        self._period_s = period_s
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        if follow:
            self._thread = threading.Thread(target=self._follow, name="fleet-reader", daemon=True)
            self._thread.start()

    def __enter__(self) -> Reader:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def view(self) -> ModelView:
        """The newest publication that was read; it does not change."""
        return self._view

    def lookup(
        self, table: str, ids: ArrayLike, out: NDArray[np.float32] | None = None
    ) -> NDArray[np.float32]:
        """The rows of ids of any shape; an id without a row gets its first value."""
        return self._view.lookup(table, ids, out)

    @property
    def dense(self) -> dict[str, NDArray[Any]]:
        """The dense values by name."""
        return self._view.dense

    @property
    def age_s(self) -> float:
        """Seconds since the servers cut the rows, by the clocks of worker 0 and of this machine."""
        return max(0.0, time.time() - self._view.time)

    @property
    def number(self) -> int:
        """The number of the publication."""
        return self._view.number

    @property
    def epoch(self) -> int:
        """Counts starts of publishers and loaded checkpoints."""
        return self._view.epoch

    @property
    def step(self) -> int:
        """The step of worker 0 at the publication."""
        return self._view.step

    def refresh(self) -> bool:
        """Read the newest publication now; True if there is a new one. Raises what is wrong."""
        with self._refreshing:
            try:
                changed = self._refresh()
            except Exception as error:
                self.error = error
                raise
            self.error = None
            return changed

    def close(self) -> None:
        """Follow no more; lookups still work."""
        self._over.set()
        if self._thread is not None:
            self._thread.join()

    def _first(self, wait_s: float) -> ModelView:
        until, has_said = time.monotonic() + wait_s, False
        while True:
            found = self._newer()
            if found is not None:
                return self._read(*found)
            if not has_said:
                # the reply to `head` does not say whether the bucket exists
                with contextlib.suppress(MissingObjectError):
                    self._store.get(MANIFEST)
            if time.monotonic() >= until:
                raise PublicationError(
                    f"{self._where}: no publication after {wait_s:g} s; check the URL, and that a "
                    "job with fleet.publish runs, or wait longer with wait_s="
                )
            if not has_said:
                logger.info("%s: waiting up to %g s for the first publication", self._where, wait_s)
                has_said = True
            time.sleep(min(_WAIT_POLL_S, max(0.0, until - time.monotonic())))

    def _follow(self) -> None:
        said = ""
        while not self._over.wait(self._period_s):
            try:
                self.refresh()
                said = ""
            except Exception as error:
                if str(error) != said:
                    said = str(error)
                    logger.warning(
                        "publication %d stays in use, because a newer one cannot be read: %s",
                        self.number,
                        error,
                    )

    def _refresh(self) -> bool:
        found = self._newer()
        if found is None:
            return False
        self._view = self._read(*found)
        return True

    def _newer(self) -> tuple[PublicationManifest, str] | None:
        """The manifest and its version, if it was replaced since the last read."""
        entry = self._store.head(MANIFEST)
        if entry is None or entry.version == self._version:
            return None
        try:
            found = self._store.get(MANIFEST)
        except MissingObjectError:
            return None
        manifest = decode(bytes(found.data), self._where)
        if self._manifest is not None:
            check_newer(manifest, self._manifest, self._where)
        return manifest, found.version

    def _read(self, manifest: PublicationManifest, version: str) -> ModelView:
        """The view of a manifest; of a newer one, where this one's files are deleted already."""
        while True:
            try:
                view = self._cache.view(manifest)
            except MissingObjectError as error:
                found = self._newer_than(manifest)
                if found is None:
                    raise PublicationError(
                        f"{self._where} names a file that is gone, and there is no newer "
                        f"publication: {error}; let the job publish again"
                    ) from error
                manifest, version = found
                continue
            self._manifest, self._version = manifest, version
            return view

    def _newer_than(self, manifest: PublicationManifest) -> tuple[PublicationManifest, str] | None:
        found = self._newer()
        is_new = found is not None and found[0].newest.id != manifest.newest.id
        return found if is_new else None
