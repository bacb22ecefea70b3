# SPDX-License-Identifier: Apache-2.0
"""Loads a checkpoint: every worker compares everything before any worker changes anything."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from torch import nn

import fleetlight.checkpoint as checkpoint
from fleetlight.errors import CheckpointError, FleetError
from fleetlight.fleet.checkpoints.save_options import FOLDER
from fleetlight.fleet.checkpoints.worker_state import parts
from fleetlight.fleet.job import Job
from fleetlight.fleet.protocols import Peers, Purpose, SavedPart
from fleetlight.fleet.training.registering import names_of, registered_model
from fleetlight.observe.log import logger
from fleetlight.ps.layers.table_weight import TableWeight

if TYPE_CHECKING:
    from fleetlight.checkpoint import Checkpoint, WorkerState

_OPERATION = "load_persistables"
#: bytes of a file in memory at a time
_CHUNK = 64 << 20


def copy_checkpoint(
    group: Peers, dirname: str, temporary: Path, *, tables: bool = True
) -> str | Path:
    """The path of the checkpoint: `dirname`, or a copy of worker 0's in `temporary`.

    Another machine may not share the path, or may have an older checkpoint there. Manifests tell
    them apart, since they contain the checksums of all files. Without `tables`, the files of tables
    are not copied.
    """
    digests = group.gather_bytes(_manifest_digest(dirname), _OPERATION)
    if len(set(digests)) == 1 or not digests[0]:
        # equal on all workers; where worker 0 has none, reading it raises the error
        return dirname
    lacks = digests[group.index] != digests[0]
    receiver = _FileReceiver(temporary if lacks else None)
    files: dict[str, Path | bytes] = {}
    for name in _names(group, lambda: files.update(_found(dirname, tables)), files):
        receiver.write(name, _chunks_of(group, files.get(name), receiver))
    group.together(receiver.check, _OPERATION)
    return temporary if lacks else dirname


class _FileReceiver:
    """Writes the received files. It reports a failure at the end: the others still receive."""

    def __init__(self, target: Path | None) -> None:
        self._target = target
        self.failure: OSError | None = None

    def write(self, name: str, chunks: Iterator[bytes]) -> None:
        """Write the chunks of a file; without a target, only consume them."""
        for number, chunk in enumerate(chunks):
            if self._target is None or self.failure is not None:
                continue
            path = self._target / name
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                with path.open("ab" if number else "wb") as file:
                    file.write(chunk)
            except OSError as error:
                self.failure = error

    def check(self) -> None:
        """CheckpointError if a read or a write has failed on this worker."""
        if self.failure is not None:
            where = f" ({self.failure.filename})" if self.failure.filename else ""
            raise CheckpointError(
                f"the checkpoint could not be copied from worker 0 to workers that do not have "
                f"it: {self.failure.strerror or self.failure}{where}; nothing was loaded"
            )


def _found(dirname: str, tables: bool) -> dict[str, Path | bytes]:
    """The files of a checkpoint by their names in the copy, verified; the manifest first."""
    saved = checkpoint.read(dirname)
    names = saved.files(tables=tables)
    manifest = {checkpoint.MANIFEST: saved.source.manifest_bytes()}
    return manifest | {saved.stored_name(name): saved.path(name) for name in names}


def _names(group: Peers, find: Callable[[], None], files: Mapping[str, Path | bytes]) -> list[str]:
    """The names of worker 0's files, on all workers."""
    group.together(find if group.index == 0 else None, _OPERATION)
    sent = group.broadcast_bytes(msgspec.json.encode([*files]), _OPERATION)
    return msgspec.json.decode(sent, type=list[str])


def _chunks_of(group: Peers, file: Path | bytes | None, receiver: _FileReceiver) -> Iterator[bytes]:
    """The chunks of worker 0's file, on all workers; an empty chunk is the end."""
    source = _read(file, receiver) if isinstance(file, Path) else _pieces(file or b"")
    while chunk := group.broadcast_bytes(next(source, b""), _OPERATION):
        yield chunk


def _pieces(data: bytes) -> Iterator[bytes]:
    return (data[start : start + _CHUNK] for start in range(0, len(data), _CHUNK))


def _read(path: Path, receiver: _FileReceiver) -> Iterator[bytes]:
    try:
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK):
                yield chunk
    except OSError as error:
        receiver.failure = error


def _manifest_digest(dirname: str) -> bytes:
    """Empty where this worker cannot read the manifest."""
    try:
        return hashlib.sha256(checkpoint.source_of(dirname).manifest_bytes()).digest()
    except FleetError:
        return b""


# not `from fleetlight import`, which imports the API and would be a circle


def load_job(
    job: Job,
    dirname: str | os.PathLike[str],
    via: str = FOLDER,
    random_later: list[Callable[[], None]] | None = None,
) -> dict[str, Any]:
    """Load a checkpoint in a worker, once; its next incarnation gets `extra` from its log.

    With `random_later`, loaders keep their positions, and the step that sets random numbers is
    appended to that list.
    """
    job.open()
    # if this worker dies now, all processes must restart
    job.replay.forget_position()

    found: list[dict[str, Any]] = []

    def load() -> list[bytes]:
        found.append(_load_job(job, dirname, via, random_later))
        return [msgspec.json.encode(checkpoint.pack(found[0], "extra", {}))]

    (logged,) = job.run_once("load_persistables", load)
    if found:
        return found[0]
    # an earlier incarnation of this worker has loaded it
    extra = checkpoint.unpack(msgspec.json.decode(logged), {})
    assert isinstance(extra, dict)
    return extra


def _load_job(
    job: Job,
    dirname: str | os.PathLike[str],
    via: str,
    random_later: list[Callable[[], None]] | None,
) -> dict[str, Any]:
    model = registered_model(job)
    temporary_folder = tempfile.TemporaryDirectory(prefix="fleet-load-")
    with job.at_rest(everything=True), temporary_folder as temporary:
        job.replay.disable("it was loading a checkpoint, or had just loaded one")
        job.group.assemble("load_persistables")
        # a background save may still be writing this checkpoint
        job.group.together(job.background_save.finish, "load_persistables")
        path = copy_checkpoint(
            job.group, os.fspath(dirname), Path(temporary), tables=job.reads_tables
        )
        return _load_from(path, job, model, via, random_later)


def _load_from(
    path: str | Path,
    job: Job,
    model: nn.Module,
    via: str,
    random_later: list[Callable[[], None]] | None,
) -> dict[str, Any]:
    with contextlib.ExitStack() as ending:
        found: list[Checkpoint] = []
        steps: list[Callable[[], None]] = []

        def fit() -> None:
            found.append(checkpoint.read(path))
            purpose = Purpose.CHECKPOINT if random_later is None else Purpose.RESUME
            positions, *others = _prepare_parts(job, found[0], purpose)
            # positions come first: they may still refuse, and can be undone
            steps.append(positions)
            loading = job.loading(found[0], via)
            ending.callback(loading.end)
            steps.extend(loading.prepare(model))
            steps.extend(_prepare_rest(job, found[0]))
            steps.extend(others)
            random = steps if random_later is None else random_later
            random.append(_prepare_rng(job, found[0]))

        def load() -> None:
            for step in steps:
                step()

        # if the checkpoint does not fit on one worker, no worker changes
        job.group.together(fit, "load_persistables")
        job.group.together(load, "load_persistables")
        return found[0].extra


class LocalLoading:
    """A load without servers: this worker reads all values."""

    def __init__(self, job: Job, saved: Checkpoint) -> None:
        self._job, self._saved = job, saved

    def prepare(self, model: nn.Module) -> Iterator[Callable[[], None]]:
        job, saved = self._job, self._saved
        optimizers = saved.optimizers()
        if len(optimizers) != len(job.optimizers):
            raise CheckpointError(
                f"{saved.directory} holds {len(optimizers)} optimizers, but this job has "
                f"{len(job.optimizers)}; register the same ones before loading"
            )
        names, tables = names_of(model), saved.moved_weights()
        _warn_of_tables(job, saved)
        state = saved.model()
        # the weight that stands for a table of any ids does not change
        open_ids = {
            n: p for p, n in names.items() if isinstance(p, TableWeight) and n in state.tensors
        }
        state = dataclasses.replace(state, tensors={**state.tensors, **tables, **open_ids})
        yield checkpoint.prepare_model_load(model, state)
        # the optimizer has no state of tables
        elsewhere = [parameter for parameter, name in names.items() if name in tables]
        for managed, one in zip(job.optimizers, optimizers, strict=True):
            yield checkpoint.prepare_optimizer_load(managed.optimizer, names, one, elsewhere)

    def end(self) -> None:
        """There is nothing to free."""


def _prepare_rest(job: Job, saved: Checkpoint) -> Iterator[Callable[[], None]]:
    yield functools.partial(setattr, job, "step", saved.manifest.step)
    for managed in job.optimizers:
        yield managed.restart_merge


def _warn_of_tables(job: Job, saved: Checkpoint) -> None:
    ignored = [entry.name for entry in saved.manifest.tables if not entry.ids]
    if ignored and job.group.index == 0:
        logger.warning(
            "the checkpoint has the tables %s, which need parameter servers: everything else is "
            "loaded",
            ", ".join(ignored),
        )


def _prepare_parts(job: Job, saved: Checkpoint, purpose: Purpose) -> Iterator[Callable[[], None]]:
    """The steps that load the other parts of a worker, those of the loaders first."""
    ranks = range(saved.manifest.workers)
    records = [saved.worker(rank) for rank in ranks]
    own = saved.worker(job.group.index)
    for part in parts(job, purpose):
        each = [_kept(record, part.name) for record in records]
        found = SavedPart(
            purpose=purpose,
            step=saved.manifest.step,
            first=each[0] if each else None,
            own=_kept(own, part.name),
            each=each,
        )
        yield functools.partial(part.load, found)


def _kept(record: WorkerState | None, name: str) -> Any:
    return None if record is None else record.values.get(name)


def _prepare_rng(job: Job, saved: Checkpoint) -> Callable[[], None]:
    """The step that restores this worker's random numbers."""
    mine = saved.worker(job.group.index)
    if mine is not None and mine.rng is not None:
        return functools.partial(checkpoint.set_rng_state, mine.rng)
    return functools.partial(
        logger.warning,
        "the checkpoint has no random-number state of this worker, which keeps its current one",
    )
