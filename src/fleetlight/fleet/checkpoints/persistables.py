# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of the whole job."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

# not `from fleetlight import`, which asks for the API, and that may be being imported
import fleetlight.checkpoint as checkpoint
from fleetlight.checkpoint import JobSnapshot, WorkerState
from fleetlight.errors import ConfigError, PeerLostError, names_arguments
from fleetlight.fleet.checkpoints.checkpoint_copy import FOLDER, check_via
from fleetlight.fleet.checkpoints.loading import load_job
from fleetlight.fleet.checkpoints.worker_state import tell_positions, worker_record
from fleetlight.fleet.job import Job, current
from fleetlight.fleet.protocols import ServerCut
from fleetlight.fleet.training import local_training
from fleetlight.fleet.training.registering import (
    has_all_of,
    names_of,
    registered_model,
)
from fleetlight.observe.log import logger

if TYPE_CHECKING:
    from fleetlight.static.program import Program

Directory = str | os.PathLike[str]


@names_arguments
def save_persistables(
    dirname: Directory,
    *others: Any,
    extra: Mapping[str, Any] | None = None,
    background: bool = False,
    via: str = FOLDER,
    program: Program | None = None,
) -> None:
    """Save model, optimizer, positions of the loaders and random numbers; every worker calls it.

    Worker 0 writes; no other worker needs the path. A failed save leaves the checkpoint that was
    there before, and is an error on every worker. `extra` comes back from `load_persistables`.

    With `background=True` the values are those at the call, and are written while training goes
    on. The next save or load, `stop_worker` and the end of the script wait for the write, and
    raise its failure.

    Parameter servers write their tables themselves, so they need the path as well; with
    `via="worker0"` they send them to worker 0 instead.

    Workers that train alone (LocalSGD, DiLoCo) meet first, and go on with the mean of their
    optimizers' states as well: to go on and to load are the same training.

    `program` may say which static program it is that trains; the files are the same without it.
    """
    _refuse_old_form("save_persistables", dirname, others)
    check_via(via)
    job = current()
    job.refuse_in_server("save_persistables")
    _check_program("save_persistables", program, job)
    _save(job, dirname, extra or {}, background=background, via=via)


@names_arguments
def load_persistables(
    dirname: Directory, *others: Any, via: str = FOLDER, program: Program | None = None
) -> dict[str, Any]:
    """Load what `save_persistables` wrote, by any number of workers; every worker calls it.

    Workers that cannot read the path get the checkpoint from worker 0; parameter servers do with
    `via="worker0"`. Any number of servers will do. What a gradient merge has of a step that is not
    made is dropped. `program` is as in `save_persistables`. Answers `extra`.
    """
    _refuse_old_form("load_persistables", dirname, others)
    check_via(via)
    job = current()
    job.refuse_in_server("load_persistables")
    _check_program("load_persistables", program, job)
    return load_job(job, dirname, via)


def _save(
    job: Job,
    dirname: Directory,
    extra: Mapping[str, Any],
    *,
    background: bool = False,
    via: str = FOLDER,
) -> None:
    model = registered_model(job)
    if not job.optimizers and job.group.index == 0:
        logger.warning(
            "save_persistables: no optimizer is registered, so no optimizer state is saved; if "
            "there is one, add optimizer = fleet.distributed_optimizer(optimizer)"
        )
    with job.at_rest():
        tell_positions(job)
        job.group.assemble("save_persistables")
        local_training.settle(job, "save_persistables")
        workers = _workers(job)

        def save() -> None:
            job.finish_save()
            snapshot = _snapshot(job, model, workers, extra)
            _write_now_or_later(job, model, dirname, snapshot, background=background, via=via)

        job.group.together(save if job.group.index == 0 else None, "save_persistables")


def save_together(
    job: Job, dirname: Directory, *, background: bool = False, via: str = FOLDER
) -> None:
    """What a job saves by itself; all workers come here behind the same step."""
    _save(job, dirname, {}, background=background, via=via)


def save_alone(
    job: Job, dirname: Directory, *, background: bool = False, via: str = FOLDER
) -> None:
    """The same where no worker waits for another: worker 0 saves what is on the servers by now.

    What the others have of their own, random numbers, is not in it.
    """
    with job.at_rest():
        if job.group.index:
            return
        # what the others have not told yet is dealt out again by whoever goes on from here
        tell_positions(job)
        job.finish_save()
        model = registered_model(job)
        snapshot = _snapshot(job, model, [worker_record(job)], {})
        _write_now_or_later(job, model, dirname, snapshot, background=background, via=via)


def _write_now_or_later(
    job: Job,
    model: nn.Module,
    dirname: Directory,
    snapshot: JobSnapshot,
    *,
    background: bool,
    via: str,
) -> None:
    if not background:
        while not _is_written(dirname, snapshot, job.cut(model, via)):
            pass
        return
    cut = job.cut(model, via)
    try:
        if cut is not None:
            snapshot = cut.completed(snapshot)
        # the script may change its working directory meanwhile
        target = Path(dirname).absolute()
        write = functools.partial(_write_and_drop, target, snapshot.detached(), cut)
        job.saving.start(write, f"save into {dirname} at step {job.step}")
        cut = None
    finally:
        if cut is not None:
            cut.drop()


def _is_written(dirname: Directory, snapshot: JobSnapshot, cut: ServerCut | None) -> bool:
    """False: a server has died over it, and all is to be asked for anew, for which it comes back.

    What is asked for may wait for that; the files of a server that has died do not.
    """
    if cut is None:
        _write(dirname, snapshot)
        return True
    try:
        whole = cut.completed(snapshot)
        try:
            _write(dirname, whole)
        except PeerLostError as lost:
            if not cut.may_be_made_again:
                raise
            logger.warning("the save into %s begins anew: %s", dirname, lost)
            return False
    finally:
        cut.drop()
    return True


def _write_and_drop(dirname: Directory, snapshot: JobSnapshot, cut: ServerCut | None) -> None:
    try:
        _write(dirname, snapshot)
    finally:
        if cut is not None:
            cut.drop()


def _snapshot(
    job: Job, model: nn.Module, workers: Sequence[WorkerState], extra: Mapping[str, Any]
) -> JobSnapshot:
    return JobSnapshot(
        model=checkpoint.model_state(model),
        optimizers=[
            checkpoint.optimizer_state(plan.optimizer, names_of(model)) for plan in job.optimizers
        ],
        workers=workers,
        seed=job.strategy.seed,
        step=job.step,
        extra=extra,
    )


def _workers(job: Job) -> list[WorkerState]:
    """The states of all workers, on worker 0, whose own does not travel."""
    mine = worker_record(job)
    told = b"" if job.group.index == 0 else mine.to_bytes()
    _, *others = job.group.bytes_to_first(told, "save_persistables") or [b""]
    states = [mine, *map(WorkerState.from_bytes, others)]
    # one may have been lost
    return [dataclasses.replace(one, rank=rank) for rank, one in enumerate(states)]


def _write(dirname: Directory, snapshot: JobSnapshot) -> None:
    checkpoint.write(dirname, snapshot)
    logger.info("saved %s at step %d", dirname, snapshot.step)


def _check_program(name: str, program: Any, job: Job) -> None:
    """Its model must be one of those that are saved."""
    if program is None:
        return
    model = getattr(program, "model", None)
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"fleet.{name}: got program={program!r:.80}, expected a static.Program that trains a "
            f"registered model; write fleet.{name}(dirname), or program.save(dirname) for a "
            "program without its model"
        )
    if not any(has_all_of(plan.module, model) for plan in job.models):
        raise ConfigError(
            f"fleet.{name}: the model of the program is no registered one, so it is not in the "
            "checkpoint; write the program with the optimizer that fleet.distributed_optimizer "
            "answered, or add model = fleet.distributed_model(model)"
        )


def _refuse_old_form(name: str, dirname: Any, others: tuple[Any, ...]) -> None:
    if others or not isinstance(dirname, (str, os.PathLike)):
        got = ", ".join(type(value).__name__ for value in (dirname, *others))
        why = "" if not others else "; there is no executor to pass here"
        raise ConfigError(
            f"fleet.{name}: got ({got}), expected a folder{why}: write fleet.{name}(dirname)"
        )
