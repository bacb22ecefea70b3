# SPDX-License-Identifier: Apache-2.0
"""`Source`: where a checkpoint is read from, a folder or a URL.

The files of a URL are fetched when they are needed, and verified, into a temporary folder that
ends with the source. Tensors that are mapped from them stay valid.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from fleetlight.checkpoint.storage.generations import (
    Directory,
    entry_of,
    manifest_bytes,
    read_manifest,
    verified,
)
from fleetlight.checkpoint.storage.manifest import (
    MANIFEST,
    AnyManifest,
    BaseManifest,
    decode,
    folder_with,
)
from fleetlight.checkpoint.storage.stored_manifest import current_manifest
from fleetlight.errors import (
    CheckpointError,
    CorruptCheckpointError,
    MissingObjectError,
    StoreError,
)
from fleetlight.files import atomic
from fleetlight.store import Data, ObjectStore, is_url, joined, store_at

#: bytes of a file in memory, and of one request for them
_BLOCK, _SPAN = 64 << 20, 8 << 20


class Source(Protocol):
    """The files of a checkpoint."""

    def manifest(self, kind: type[AnyManifest], format_name: str) -> AnyManifest:
        """The manifest of the current generation."""

    def manifest_bytes(self) -> bytes:
        """The manifest as it is stored."""

    def path(self, manifest: BaseManifest, name: str) -> Path:
        """A file of a generation, verified."""

    def verify(self, manifest: BaseManifest, name: str) -> None:
        """Raise if a file of a generation is not as it was written."""

    def location(self, folder: str) -> str:
        """The folder or URL of a generation, for other processes."""

    def sizes(self, folder: str) -> dict[str, int]:
        """The sizes of the files in the folder of a generation."""


class FolderSource:
    """A checkpoint in a local folder."""

    def __init__(self, dirname: Directory) -> None:
        self._root = Path(dirname)

    def manifest(self, kind: type[AnyManifest], format_name: str) -> AnyManifest:
        """See `Source`."""
        return read_manifest(self._root, kind, format_name)

    def manifest_bytes(self) -> bytes:
        """See `Source`."""
        return manifest_bytes(self._root)

    def path(self, manifest: BaseManifest, name: str) -> Path:
        """See `Source`."""
        return verified(self._root, manifest, name)

    def verify(self, manifest: BaseManifest, name: str) -> None:
        """See `Source`."""
        self.path(manifest, name)

    def location(self, folder: str) -> str:
        """See `Source`."""
        return str((self._root / folder).absolute())

    def sizes(self, folder: str) -> dict[str, int]:
        """See `Source`."""
        try:
            return {path.name: path.stat().st_size for path in (self._root / folder).iterdir()}
        except OSError as error:
            raise CheckpointError(f"{self._root / folder} cannot be read: {error}") from error


class StoredSource:
    """A checkpoint under a URL."""

    def __init__(self, url: str) -> None:
        self._store: ObjectStore = store_at(url)
        self._fetched: Path | None = None

    @property
    def store(self) -> ObjectStore:
        """The store of the URL."""
        return self._store

    def manifest(self, kind: type[AnyManifest], format_name: str, folder: str = "") -> AnyManifest:
        """See `Source`; `folder`: of that generation, an earlier one."""
        where = joined(self._store.url, joined(folder, MANIFEST) if folder else MANIFEST)
        return decode(self.manifest_bytes(folder), kind, format_name, where)

    def manifest_bytes(self, folder: str = "") -> bytes:
        """See `Source`; `folder` is as above."""
        name = joined(folder, MANIFEST) if folder else MANIFEST
        try:
            found = self._store.get(name) if folder else current_manifest(self._store)
        except MissingObjectError:
            found = None
        except StoreError as error:
            raise CheckpointError(str(error)) from error
        if found is None:
            raise CheckpointError(
                f"{joined(self._store.url, name)} does not exist; expected the URL of a finished "
                "save"
            )
        return bytes(found.data)

    def path(self, manifest: BaseManifest, name: str) -> Path:
        """See `Source`."""
        if self._fetched is None:
            self._fetched = Path(tempfile.mkdtemp(prefix="fleet-fetched-"))
            weakref.finalize(self, shutil.rmtree, self._fetched, ignore_errors=True)
        path = self._fetched / folder_with(manifest, name) / name
        if not path.exists():
            path.parent.mkdir(exist_ok=True)
            with atomic.replacing(path, unique=True) as temporary, temporary.open("wb") as file:
                for block in self._blocks(manifest, name):
                    file.write(block)
        return path

    def verify(self, manifest: BaseManifest, name: str) -> None:
        """See `Source`."""
        for _ in self._blocks(manifest, name):
            pass

    def _blocks(self, manifest: BaseManifest, name: str) -> Iterator[Data]:
        """The bytes of a file of a generation; raises after the last one if they are not right."""
        expected = entry_of(manifest, name, joined(self._store.url, MANIFEST))
        stored = joined(folder_with(manifest, name), name)
        where = joined(self._store.url, stored)
        try:
            there, digest = self._store.head(stored), hashlib.sha256()
            if there is None:
                raise _missing(self._store, where, manifest)
            size = there.size
            for start in range(0, size if size == expected.bytes else 0, _BLOCK):
                stop = min(start + _BLOCK, size)
                spans = [(at, min(at + _SPAN, stop)) for at in range(start, stop, _SPAN)]
                for data in self._store.get_ranges(stored, spans):
                    digest.update(data)
                    yield data
        except StoreError as error:
            raise CheckpointError(str(error)) from error
        if size != expected.bytes or digest.hexdigest() != expected.sha256:
            raise CorruptCheckpointError(
                f"{where} was changed after it was written: got {size} bytes with sha256 "
                f"{digest.hexdigest()}, expected {expected.bytes} with {expected.sha256}; load "
                "another checkpoint"
            )

    def location(self, folder: str) -> str:
        """See `Source`."""
        return joined(self._store.url, folder)

    def sizes(self, folder: str) -> dict[str, int]:
        """See `Source`."""
        prefix = f"{folder}/"
        try:
            found = self._store.list(prefix)
        except StoreError as error:
            raise CheckpointError(str(error)) from error
        return {entry.name.removeprefix(prefix): entry.size for entry in found}


def source_of(location: Directory) -> Source:
    """The source of a folder or a URL."""
    return StoredSource(os.fspath(location)) if is_url(location) else FolderSource(location)


def exists(location: Directory) -> bool:
    """Whether there is a checkpoint in a folder or under a URL."""
    if not is_url(location):
        return Path(location, MANIFEST).exists()
    try:
        # asking for its description alone does not tell a bucket that does not exist
        store_at(location).get(MANIFEST)
    except MissingObjectError:
        return False
    except StoreError as error:
        raise CheckpointError(str(error)) from error
    return True


def _missing(store: ObjectStore, where: str, manifest: BaseManifest) -> CheckpointError:
    now = StoredSource(store.url).manifest(type(manifest), manifest.format).generation
    if now != manifest.generation:
        return CheckpointError(
            f"{store.url}: generation {manifest.generation} was replaced by {now} while it was "
            "being read; read the URL again"
        )
    return CorruptCheckpointError(
        f"{where} is missing, but {MANIFEST} names it; load another checkpoint"
    )
