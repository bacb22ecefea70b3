# SPDX-License-Identifier: Apache-2.0
"""Loads a checkpoint: every worker compares everything before any worker changes anything."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from torch import nn

# not `from fleetlight import`, which imports the API and would be a circle
import fleetlight.checkpoint as checkpoint
from fleetlight.errors import CheckpointError
from fleetlight.fleet.checkpoints.checkpoint_copy import copy_checkpoint
from fleetlight.fleet.checkpoints.save_options import FOLDER
from fleetlight.fleet.checkpoints.worker_state import parts
from fleetlight.fleet.job import Job
from fleetlight.fleet.protocols import Purpose, SavedPart
from fleetlight.fleet.training.registering import names_of, registered_model
from fleetlight.observe.log import logger
from fleetlight.ps.layers.table_weight import TableWeight

if TYPE_CHECKING:
    from fleetlight.checkpoint import Checkpoint, WorkerState


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
