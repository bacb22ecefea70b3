# SPDX-License-Identifier: Apache-2.0
"""Generations under a URL: each save writes a new folder, then swaps the manifest.

    URL/manifest.json                          names the current generation, and earlier ones
    URL/generation-000007-5f0c91d2/...         its files, and a copy of its manifest

A save reads the manifest, writes a folder with a name of its own, compares the sizes that arrived,
and replaces the manifest if it is still the one that was read. So of two jobs that save at the same
time the second is refused, and there is no lock that a killed job could leave. A folder that no
manifest names, and whose number is not above the current one, can never become current: the save
removes it, and the generations beyond those that are kept. The base of a delta stays with it.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import secrets
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import msgspec

from fleetlight.checkpoint.storage.generations import header, refuse_other_base
from fleetlight.checkpoint.storage.manifest import (
    MANIFEST,
    AnyManifest,
    BaseEntry,
    BaseManifest,
    EarlierEntry,
    FileEntry,
    Named,
    base_folder,
    encode,
)
from fleetlight.checkpoint.storage.stored_manifest import FOLDER, current_manifest
from fleetlight.errors import (
    CheckpointError,
    CorruptCheckpointError,
    PeerError,
    StoreError,
)
from fleetlight.store import Object, ObjectStore, joined, store_at

#: how often a damaged manifest is sent again
_TRIES = 3
_log = logging.getLogger(__name__)


class StoredSink:
    """A new object, written to a temporary file first, so that a failed upload starts again."""

    entry: FileEntry

    def __init__(self, name: str, file: IO[bytes]) -> None:
        self._name, self._file = name, file
        self._size, self._digest = 0, hashlib.sha256()

    def write(self, data: bytes | memoryview, /) -> None:
        """Append all of `data`."""
        self._file.write(data)
        self._digest.update(data)
        self._size += memoryview(data).nbytes

    def close(self) -> None:
        """Flush and describe the file."""
        self._file.flush()
        self.entry = FileEntry(self._name, self._size, self._digest.hexdigest())


class StoredGeneration:
    """A save in progress; no reader uses it before `publish`."""

    def __init__(self, store: ObjectStore, format_name: str, keep: int) -> None:
        self._store, self.format, self._keep = store, format_name, keep
        self._before = current_manifest(store)
        self._head = None if self._before is None else _head(self._before, store.url, format_name)
        self.number = 1 if self._head is None else self._head.generation + 1
        self.folder = f"generation-{self.number:06d}-{secrets.token_hex(4)}"
        self.files: list[FileEntry] = []
        self.published = False

    @property
    def location(self) -> str:
        """The URL of the folder, for other processes."""
        return joined(self._store.url, self.folder)

    @contextlib.contextmanager
    def create(self, name: str) -> Iterator[StoredSink]:
        """A new object of this generation."""
        with tempfile.NamedTemporaryFile(prefix="fleet-save-") as file:
            sink = StoredSink(name, file.file)
            yield sink
            sink.close()
            self._store.put(joined(self.folder, name), Path(file.name))
            self.files.append(sink.entry)

    def add(self, entry: FileEntry, path: Path) -> None:
        """Upload a file that was verified."""
        self._store.put(joined(self.folder, entry.name), path)
        self.files.append(entry)

    def placed(self, manifest: AnyManifest) -> AnyManifest:
        """The manifest of another checkpoint, as that of this generation."""
        return msgspec.structs.replace(
            manifest,
            generation=self.number,
            folder=self.folder,
            earlier=self._earlier(),
            base=msgspec.UNSET,
            name=msgspec.UNSET,
            files=self.files,
        )

    def header(self) -> dict[str, Any]:
        """The fields of a `BaseManifest`, once all objects are written."""
        fields = header(self.format, self.number, self.files)
        return {**fields, "folder": self.folder, "earlier": self._earlier()}

    def publish(self, manifest: BaseManifest) -> None:
        """Make this the current generation, and remove what is no longer kept."""
        there = self._store.head(MANIFEST)
        if (there and there.version) != (self._before and self._before.version):
            # it has removed the objects of this save
            raise self._refusal()
        if isinstance(manifest.base, BaseEntry):
            refuse_other_base(self._head, manifest.base, self._store.url)
        self._compare_sizes()
        data = encode(manifest)
        self._store.put(joined(self.folder, MANIFEST), data)
        # after an error it is unknown whether the manifest is there: then the folder stays
        self.published = True
        if not self._put_manifest(data):
            self.published = False
            raise self._refusal()
        kept = kept_folders(self.folder, base_folder(manifest), self._earlier())
        remove_folders(self._store, self.number, kept)

    def discard(self) -> None:
        """Remove the objects of a failed save."""
        with contextlib.suppress(StoreError):
            found = self._store.list(f"{self.folder}/")
            self._store.delete([entry.name for entry in found])

    def kept(self) -> str:
        """What a failed save has left, in words."""
        if self._head is None:
            return "there was no checkpoint there"
        return f"generation {self._head.generation} there is intact"

    def _earlier(self) -> list[EarlierEntry]:
        """The generations before this one that are kept."""
        if self._head is None or not isinstance(self._head.folder, str):
            return []
        base = "" if self._head.base is None else self._head.base.folder
        newest = EarlierEntry(self._head.generation, self._head.folder, base)
        before = [newest, *self._head.earlier]
        return before[: self._keep - 1]

    def _put_manifest(self, data: bytes) -> bool:
        """Replace the manifest, and look whether it arrived whole; False: another job was first."""
        version = None if self._before is None else self._before.version
        for _ in range(_TRIES):
            if version is None:
                made = self._store.create(MANIFEST, data)
            else:
                made = self._store.swap(MANIFEST, data, version)
            if made is None:
                return False
            there = self._store.get(MANIFEST)
            if bytes(there.data) == data or there.version != made:
                # with another version, a later save has replaced it already
                return True
            version = made
        raise CorruptCheckpointError(
            f"{joined(self._store.url, MANIFEST)} did not arrive whole in {_TRIES} attempts; check "
            "what is between this machine and the bucket, and save again"
        )

    def _refusal(self) -> CheckpointError:
        return CheckpointError(
            f"{self._store.url}: another process has saved there since this save began, so this "
            "one was refused; let only one job save under a URL, or save again"
        )

    def _compare_sizes(self) -> None:
        """CorruptCheckpointError if an object is not there as it was sent."""
        prefix = f"{self.folder}/"
        there = {entry.name: entry.size for entry in self._store.list(prefix)}
        for file in self.files:
            got = there.get(prefix + file.name)
            if got != file.bytes:
                what = "is missing" if got is None else f"has {got} bytes"
                raise CorruptCheckpointError(
                    f"{joined(self.location, file.name)} {what} after its upload, expected "
                    f"{file.bytes} bytes; save again"
                )


class StoredHead(Named, frozen=True, kw_only=True):
    """The fields of a manifest under a URL that the next save needs."""

    format: str
    folder: str | None = None
    earlier: list[EarlierEntry] = msgspec.field(default_factory=list)


def kept_folders(folder: str, base: str, earlier: list[EarlierEntry]) -> set[str]:
    """The folders of generations that are kept, and of their bases."""
    kept = {folder, base}
    for one in earlier:
        kept |= {one.folder, one.base}
    return kept - {""}


def remove_folders(store: ObjectStore, newest: int, kept: set[str]) -> int:
    """Remove folders of generations up to a number, except some; returns how many.

    A failure costs only space; the next save tries again.
    """
    gone: set[str] = set()
    try:
        names = [entry.name for entry in store.list("generation-")]
        for name in names:
            found = FOLDER.match(name)
            folder = name.partition("/")[0]
            if found and int(found[1]) <= newest and folder not in kept:
                gone.add(folder)
        # manifests first: what is half removed must not look whole
        old = [name for name in names if name.partition("/")[0] in gone]
        store.delete(sorted(old, key=lambda name: (not name.endswith(f"/{MANIFEST}"), name)))
    except StoreError as error:
        _log.warning("%s: old generations were not removed: %s", store.url, error)
    return len(gone)


@contextlib.contextmanager
def new_stored_generation(url: str, format_name: str, keep: int) -> Iterator[StoredGeneration]:
    """Yield a new generation under a URL to fill and publish; clean up after failures."""
    kept = "nothing was saved"
    try:
        generation = StoredGeneration(store_at(url), format_name, keep)
        kept = generation.kept()
        try:
            yield generation
        finally:
            if not generation.published:
                generation.discard()
    except PeerError:
        # some are OSErrors as well, but concern another process
        raise
    except (StoreError, OSError) as error:
        raise CheckpointError(f"could not save into {url}: {error}; {kept}") from None


def stored_head(data: bytes, where: str) -> StoredHead:
    """The head of a manifest."""
    try:
        return msgspec.json.decode(data, type=StoredHead)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CorruptCheckpointError(
            f"{where} is damaged ({len(data)} bytes): {error}; nothing was saved. Name another URL"
        ) from error


def _head(found: Object, url: str, format_name: str) -> StoredHead:
    where = joined(url, MANIFEST)
    head = stored_head(bytes(found.data), where)
    if head.format != format_name or head.folder is None:
        raise CheckpointError(
            f"{where} is not the manifest of a {format_name} under a URL, so saving would destroy "
            "something else; name another URL"
        )
    return head
