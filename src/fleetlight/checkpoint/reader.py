# SPDX-License-Identifier: Apache-2.0
"""`read`: a checkpoint on disk. Files are verified and opened on demand."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path
from typing import Any

import msgspec
from torch import Tensor

from fleetlight.checkpoint.formats.tables import TableOnDisk, materialize
from fleetlight.checkpoint.formats.tensors import StreamedTensor, read_tensors, write_tensors
from fleetlight.checkpoint.formats.values import unpack
from fleetlight.checkpoint.snapshot import MODEL_FILE, optimizer_file
from fleetlight.checkpoint.state.model import ModelState
from fleetlight.checkpoint.state.optimizer import OptimizerState
from fleetlight.checkpoint.state.worker import WorkerState, read_worker, record_file, tensor_file
from fleetlight.checkpoint.storage import files
from fleetlight.checkpoint.storage.generations import Directory
from fleetlight.checkpoint.storage.manifest import (
    FORMAT,
    BaseEntry,
    Manifest,
    TableEntry,
    all_files,
    base_folder,
    folder_of,
    folder_with,
)
from fleetlight.checkpoint.storage.sources import Source, source_of
from fleetlight.errors import CheckpointError
from fleetlight.store import is_url, joined


class Checkpoint:
    """A finished save. Its tensors are mapped from the files: load them, do not change them."""

    def __init__(self, directory: Path | str, source: Source, manifest: Manifest) -> None:
        """`directory`: for messages, a path or a URL."""
        self.directory = directory
        self.source = source
        self.manifest = manifest

    @property
    def extra(self) -> dict[str, Any]:
        """The `extra` of the saved `JobSnapshot`."""
        return {key: unpack(value, {}) for key, value in self.manifest.extra.items()}

    def model(self) -> ModelState:
        """The model's state."""
        tensors = self._tensors(MODEL_FILE)
        entries = [entry for entry in self.manifest.tensors if entry.file == MODEL_FILE]
        return ModelState(
            {entry.name: tensors[entry.name] for entry in entries},
            {entry.name: entry.kind for entry in entries},
            self.manifest.aliases,
            self.manifest.model_extra,
        )

    def optimizers(self) -> list[OptimizerState]:
        """The states of the optimizers, in the order in which they were saved."""
        return [
            OptimizerState(entry, self._tensors(optimizer_file(number)))
            for number, entry in enumerate(self.manifest.optimizers)
        ]

    def worker(self, rank: int) -> WorkerState | None:
        """The state of one worker at the save, None if there was no such worker."""
        names = {entry.name for entry in self.manifest.files}
        if record_file(rank) not in names:
            return None
        tensors = self._tensors(tensor_file(rank)) if tensor_file(rank) in names else {}
        return read_worker(self.path(record_file(rank)), tensors)

    def workers(self) -> list[WorkerState]:
        """The states of all workers at the save, by rank."""
        states = (self.worker(rank) for rank in range(self.manifest.workers))
        return [state for state in states if state is not None]

    def table(self, entry: TableEntry) -> TableOnDisk:
        """The rows of a table."""
        names = (file.name for file in entry.files)
        return TableOnDisk(entry, [self._tensors(name) for name in names])

    def moved_weights(self) -> dict[str, Tensor]:
        """The weights of layers of torch that were tables when this was saved."""
        return {
            name: materialize(self.table(entry).dense())
            for entry in self.manifest.tables
            if entry.ids
            for name in entry.weights
        }

    @property
    def location(self) -> str:
        """The folder or URL of its files, for other processes."""
        return self.source.location(folder_of(self.manifest))

    @property
    def base_location(self) -> str:
        """As `location`, of the base of a delta; "" for other checkpoints."""
        folder = base_folder(self.manifest)
        return self.source.location(folder) if folder else ""

    @property
    def base_files(self) -> list[str]:
        """The names of the files that the base has."""
        base = self.manifest.base
        return [file.name for file in base.files] if isinstance(base, BaseEntry) else []

    def checksums(self, names: Collection[str]) -> dict[str, tuple[int, str]]:
        """The size and the checksum of each of some files."""
        entries = all_files(self.manifest)
        return {name: (entries[name].bytes, entries[name].sha256) for name in names}

    def stored_name(self, name: str) -> str:
        """The path of a file below the checkpoint's folder or URL."""
        return joined(folder_with(self.manifest, name), name)

    def path(self, name: str) -> Path:
        """A file, verified."""
        return self.source.path(self.manifest, name)

    def unverified(self, name: str) -> Path:
        """A file whose bytes someone else verifies; that of a URL is verified as it is fetched."""
        if is_url(self.location):
            return self.path(name)
        return Path(self.source.location(folder_with(self.manifest, name)), name)

    def files(self, *, tables: bool = True) -> list[str]:
        """The names of its files."""
        left_out = set() if tables else {f.name for t in self.manifest.tables for f in t.files}
        return [name for name in all_files(self.manifest) if name not in left_out]

    def verify(self) -> None:
        """Verify the bytes of every file."""
        for name in all_files(self.manifest):
            self.path(name)

    def _tensors(self, name: str) -> dict[str, Tensor]:
        return read_tensors(self.path(name))


def read(dirname: Directory) -> Checkpoint:
    """The checkpoint in a folder or under a URL. Reads the manifest only."""
    source = source_of(dirname)
    directory = os.fspath(dirname) if is_url(dirname) else Path(dirname)
    return Checkpoint(directory, source, source.manifest(Manifest, FORMAT))


def export(dirname: Directory, out: Directory) -> Path:
    """Write the model of a checkpoint as one safetensors file that plain PyTorch loads.

    The names are those of `model.state_dict()`; tied tensors stand under each of their names.
    Extra state goes into the file's metadata as JSON. A table becomes `<table>.ids`, ascending, and
    `<table>.weight`, their rows; one of a layer of torch is its materialize weight again.
    """
    path, saved = Path(out), read(dirname)
    state, tables = saved.model(), _tables(saved)
    tensors = {**state.tensors, **tables}
    tied = {second: tensors[first] for second, first in state.aliases.items()}
    extra = {"extra_state": msgspec.json.encode(state.extra).decode()} if state.extra else {}
    try:
        with files.replacing(path) as sink:
            write_tensors(sink, {**tensors, **tied}, extra)
    except OSError as error:
        raise CheckpointError(
            f"could not export to {path}: {error.strerror or error}; expected a file name in an "
            f"existing directory that can be written"
        ) from error
    return path


def _tables(saved: Checkpoint) -> dict[str, Tensor | StreamedTensor]:
    """The exported tensors of all tables."""
    tensors: dict[str, Tensor | StreamedTensor] = {}
    for entry in saved.manifest.tables:
        tensors |= saved.table(entry).exported()
    return tensors
