# SPDX-License-Identifier: Apache-2.0
"""What `fleetlight checkpoints` does: list, verify, prune and copy. It needs no torch."""

from __future__ import annotations

import os
from collections.abc import Callable

import msgspec

from fleetlight.checkpoint.storage.generations import Directory, new_generation, prune_folder
from fleetlight.checkpoint.storage.manifest import (
    FORMAT,
    MANIFEST,
    EarlierEntry,
    Manifest,
    all_files,
    base_folder,
    encode,
    folder_of,
)
from fleetlight.checkpoint.storage.sources import FolderSource, StoredSource
from fleetlight.checkpoint.storage.stored_generations import (
    kept_folders,
    new_stored_generation,
    remove_folders,
)
from fleetlight.errors import CheckpointError, ConfigError, CorruptCheckpointError, StoreError
from fleetlight.store import is_url

#: called with the name of each file
Progress = Callable[[str], None]


def generations(location: Directory) -> list[Manifest]:
    """The generations in a folder or under a URL, the current one first."""
    if not is_url(location):
        return [FolderSource(location).manifest(Manifest, FORMAT)]
    source = StoredSource(os.fspath(location))
    current = source.manifest(Manifest, FORMAT)
    return [current, *(source.manifest(Manifest, FORMAT, one.folder) for one in _earlier(current))]


def chosen(location: Directory, number: int | None) -> Manifest:
    """The generation of a number; None: the current one."""
    found = generations(location)
    for manifest in found:
        if number in (None, manifest.generation):
            return manifest
    numbers = ", ".join(str(one.generation) for one in found)
    raise ConfigError(f"{location} has no generation {number}; it has {numbers}")


def verify(location: Directory, manifest: Manifest, progress: Progress) -> None:
    """Read all bytes of a generation and its base, and compare them with its manifest."""
    source = _source(location)
    for name in all_files(manifest):
        progress(name)
        source.verify(manifest, name)


def prune(location: Directory, keep: int) -> int:
    """Remove all but the last generations, and what crashed saves left; returns how many folders.

    The manifest forgets a generation before its files are removed.
    """
    if keep < 1:
        raise ConfigError(f"got keep={keep}, expected at least 1: the current generation stays")
    if not is_url(location):
        return prune_folder(location, FORMAT)
    source = StoredSource(os.fspath(location))
    store = source.store
    try:
        before = store.get(MANIFEST)
        current = source.manifest(Manifest, FORMAT)
        kept = _earlier(current)[: keep - 1]
        data = encode(msgspec.structs.replace(current, earlier=kept))
        if len(kept) < len(_earlier(current)) and not store.swap(MANIFEST, data, before.version):
            raise CheckpointError(
                f"{location}: a job has saved there at this moment, so nothing was removed; try "
                "again"
            )
    except StoreError as error:
        raise CheckpointError(str(error)) from error
    names = kept_folders(folder_of(current), base_folder(current), kept)
    return remove_folders(store, current.generation, names)


def copy(location: Directory, to: Directory, number: int | None, progress: Progress) -> Manifest:
    """Copy a generation, verified, as the newest one of another folder or URL.

    The files of a base are copied into the folder of the delta.
    """
    manifest, source = chosen(location, number), _source(location)
    target = (
        new_stored_generation(os.fspath(to), FORMAT, keep=2)
        if is_url(to)
        else new_generation(to, FORMAT)
    )
    with target as generation:
        entries = list(all_files(manifest).values())
        for entry in entries:
            progress(entry.name)
            path = source.path(manifest, entry.name)
            generation.add(entry, path)
            if isinstance(source, StoredSource):
                path.unlink()
        if generation.files != entries:
            raise CorruptCheckpointError(
                f"{location} changed while it was copied; nothing was saved, copy it again"
            )
        copied = generation.placed(manifest)
        generation.publish(copied)
    return copied


def _source(location: Directory) -> FolderSource | StoredSource:
    return StoredSource(os.fspath(location)) if is_url(location) else FolderSource(location)


def _earlier(manifest: Manifest) -> list[EarlierEntry]:
    return manifest.earlier if isinstance(manifest.earlier, list) else []
