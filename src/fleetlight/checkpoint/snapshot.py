# SPDX-License-Identifier: Apache-2.0
"""`JobSnapshot`: the content of a checkpoint, and `write`, which makes it durable."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from fleetlight.checkpoint.formats.tensors import describe_tensors, refuse_unstorable, write_tensors
from fleetlight.checkpoint.formats.values import pack, unpack
from fleetlight.checkpoint.state.model import ModelState
from fleetlight.checkpoint.state.optimizer import OptimizerState
from fleetlight.checkpoint.state.worker import WorkerState, write_worker
from fleetlight.checkpoint.storage.files import FileTarget
from fleetlight.checkpoint.storage.generations import Directory, Generation, new_generation
from fleetlight.checkpoint.storage.manifest import (
    FORMAT,
    BaseEntry,
    FileEntry,
    HighWaterEntry,
    Manifest,
    TableEntry,
    TensorEntry,
)
from fleetlight.checkpoint.storage.stored_generations import (
    StoredGeneration,
    new_stored_generation,
)
from fleetlight.errors import CheckpointError
from fleetlight.store import is_url

MODEL_FILE = "model.safetensors"


@dataclasses.dataclass(frozen=True)
class SavedTables:
    """The tables of parameter servers, and the files that the servers wrote for them."""

    tables: Sequence[TableEntry] = ()
    files: Sequence[FileEntry] = ()
    high_water: Sequence[HighWaterEntry] = ()
    #: the generation with the other rows, if these are a delta
    base: BaseEntry | None = None
    #: if they are all rows, and a later save may have only what changed since: their name
    name: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class JobSnapshot:
    """The state of a job between two steps."""

    model: ModelState
    optimizers: Sequence[OptimizerState] = ()
    workers: Sequence[WorkerState] = ()
    server_num: int = 0
    #: makes the servers write their tables
    save_tables: Callable[[FileTarget], SavedTables] | None = None
    seed: int = 0
    #: how often the job's servers were loaded from a checkpoint; frames of older epochs are refused
    epoch: int = 0
    step: int = 0
    #: anything else to be found in the manifest: numbers, strings, None, containers of these
    extra: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def detached(self) -> JobSnapshot:
        """A copy on the CPU, to be written while training changes the original.

        Raises here for what cannot be saved, not when it is written.
        """
        return dataclasses.replace(
            self,
            model=dataclasses.replace(self.model, tensors=_copies(self.model.tensors)),
            optimizers=[
                dataclasses.replace(optimizer, tensors=_copies(optimizer.tensors))
                for optimizer in self.optimizers
            ],
            workers=[WorkerState.from_bytes(worker.to_bytes()) for worker in self.workers],
            extra={key: unpack(_pack_extra(key, v), {}) for key, v in self.extra.items()},
        )


def write(dirname: Directory, snapshot: JobSnapshot, *, keep: int = 1) -> Manifest:
    """Save `snapshot` as the checkpoint in a folder or under a URL; it is durable at the return.

    Until then, and after any failure, `dirname` holds the checkpoint that was there before. Under a
    URL the last `keep` generations stay.
    """
    with _new_generation(dirname, keep) as generation:
        tensors = _write_files(generation, snapshot)
        save_tables = snapshot.save_tables
        saved = SavedTables() if save_tables is None else save_tables(generation)
        generation.files += saved.files
        manifest = _manifest(generation, snapshot, tensors, saved)
        generation.publish(manifest)
    return manifest


def _new_generation(
    dirname: Directory, keep: int
) -> contextlib.AbstractContextManager[Generation | StoredGeneration]:
    if is_url(dirname):
        return new_stored_generation(os.fspath(dirname), FORMAT, keep)
    return new_generation(dirname, FORMAT)


def optimizer_file(number: int) -> str:
    """The name of an optimizer's tensor file. Most jobs have one optimizer."""
    return f"optimizer-{number}.safetensors" if number else "optimizer.safetensors"


def _copies(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    for name, tensor in tensors.items():
        refuse_unstorable(name, tensor)
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}


def _write_files(
    generation: Generation | StoredGeneration, snapshot: JobSnapshot
) -> list[TensorEntry]:
    ranks = [worker.rank for worker in snapshot.workers]
    if ranks != list(range(len(ranks))):
        raise CheckpointError(
            f"cannot save the states of workers {ranks}; expected one of each worker, in order"
        )
    entries = _write_model(generation, snapshot.model)
    for number, optimizer in enumerate(snapshot.optimizers):
        with generation.create(optimizer_file(number)) as sink:
            write_tensors(sink, optimizer.tensors)
        entries += describe_tensors(optimizer.tensors, "optimizer", optimizer_file(number))
    for worker in snapshot.workers:
        entries += write_worker(generation, worker)
    return entries


def _write_model(generation: Generation | StoredGeneration, model: ModelState) -> list[TensorEntry]:
    with generation.create(MODEL_FILE) as sink:
        write_tensors(sink, model.tensors)
    return [
        entry
        for name, tensor in model.tensors.items()
        for entry in describe_tensors({name: tensor}, model.kinds[name], MODEL_FILE)
    ]


def _manifest(
    generation: Generation | StoredGeneration,
    snapshot: JobSnapshot,
    tensors: list[TensorEntry],
    saved: SavedTables,
) -> Manifest:
    return Manifest(
        **{**generation.header(), **_delta_fields(saved)},
        workers=max(1, len(snapshot.workers)),
        servers=snapshot.server_num,
        seed=snapshot.seed,
        epoch=snapshot.epoch,
        step=snapshot.step,
        tensors=tensors,
        aliases=dict(snapshot.model.aliases),
        model_extra=dict(snapshot.model.extra),
        optimizers=[optimizer.entry for optimizer in snapshot.optimizers],
        tables=list(saved.tables),
        high_water=list(saved.high_water),
        extra={key: _pack_extra(key, value) for key, value in snapshot.extra.items()},
    )


def _delta_fields(saved: SavedTables) -> dict[str, Any]:
    """The fields that only a delta, or only a base has."""
    if saved.base is not None:
        return {"base": saved.base}
    return {"name": saved.name} if saved.name else {}


def _pack_extra(key: str, value: object) -> Any:
    tensors: dict[str, Tensor] = {}
    packed = pack(value, f"extra.{key}", tensors)
    if tensors:
        raise CheckpointError(
            f"{min(tensors)} cannot be saved: got a tensor, but `extra` is kept in the manifest; "
            f"expected numbers, strings, None and containers of these"
        )
    return packed
