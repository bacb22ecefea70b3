# SPDX-License-Identifier: Apache-2.0
"""`save_persistables` and `load_persistables`: checkpoints of the whole job."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import nn

# not `from fleetlight import`, which imports the API and would be a circle
import fleetlight.checkpoint as checkpoint
from fleetlight.errors import ConfigError, PeerLostError, names_arguments
from fleetlight.fleet.checkpoints.loading import load_job
from fleetlight.fleet.checkpoints.save_options import FOLDER, SaveOptions, check_via
from fleetlight.fleet.checkpoints.worker_state import report_positions, worker_record
from fleetlight.fleet.job import Job, current
from fleetlight.fleet.protocols import ServerSnapshot
from fleetlight.fleet.recording.process_metrics import note
from fleetlight.fleet.training import local_training
from fleetlight.fleet.training.registering import (
    has_all_of,
    names_of,
    registered_model,
)
from fleetlight.observe.log import logger
from fleetlight.roles import Role
from fleetlight.store import absolute

if TYPE_CHECKING:
    from fleetlight.checkpoint import JobSnapshot, WorkerState
    from fleetlight.static.program import Program

Directory = str | os.PathLike[str]
_Write = Callable[[Directory, "JobSnapshot"], None]


@names_arguments
def save_persistables(
    dirname: Directory,
    *others: Any,
    extra: Mapping[str, Any] | None = None,
    background: bool = False,
    via: str = FOLDER,
    base_every: int = 1,
    program: Program | None = None,
) -> None:
    """Save model, optimizer, positions of the loaders and random numbers; every worker calls it.

    Worker 0 writes; no other worker needs the path. A failed save raises on every worker, and
    leaves the previous checkpoint. Workers that train alone (LocalSGD, DiLoCo) first average their
    parameters and the states of their optimizers, so that this job continues exactly as one that
    loads the checkpoint.

    Args:
        dirname: a folder, or a URL such as s3://bucket/run, where the last generations are kept.
        others: none; an error explains calls in Fleet's old form.
        extra: values of your own, which `load_persistables` returns.
        background: True writes the values at the call during training. The next save or load,
            `stop_worker` and the end of the script wait for the write, and raise its failure.
        via: `"folder"`: parameter servers write their tables themselves, so they need the path,
            too. `"worker0"`: they send them to worker 0.
        base_every: every nth save has all rows of tables; the others have those that changed since.
        program: the static program that trains; the files are the same without it.

    Raises:
        ConfigError: an argument is wrong.
        CheckpointError: the checkpoint could not be written.
        DeadlineError: a worker did not make the call.

    Example:
        >>> fleet.init(is_collective=True)
        >>> model = fleet.distributed_model(nn.Linear(2, 1))
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> optimizer = fleet.distributed_optimizer(optimizer)
        >>> fleet.save_persistables("checkpoint", extra={"epoch": 3})
        >>> fleet.load_persistables("checkpoint")
        {'epoch': 3}
    """
    _refuse_old_form("save_persistables", dirname, others)
    how = SaveOptions(background=background, via=via, base_every=base_every)
    how.check()
    job = current()
    job.refuse_in_server("save_persistables")
    _check_program("save_persistables", program, job)
    _save(job, dirname, extra or {}, how)


@names_arguments
def load_persistables(
    dirname: Directory, *others: Any, via: str = FOLDER, program: Program | None = None
) -> dict[str, Any]:
    """Load a checkpoint of `save_persistables`; every worker calls it.

    The numbers of workers and servers may differ from those of the save. Merged gradients of an
    unfinished step are dropped.

    Args:
        dirname: the folder or URL.
        others: none; an error explains calls in Fleet's old form.
        via: `"folder"`: parameter servers read the path. `"worker0"`: worker 0 sends them their
            part. Workers that cannot read the path always get it from worker 0.
        program: the static program that trains; the result is the same without it.

    Returns:
        The `extra` of the save.

    Raises:
        ConfigError: an argument is wrong.
        CheckpointError: there is no checkpoint, it is damaged, or it does not fit the model.

    Example:
        >>> fleet.init(is_collective=True)
        >>> model = fleet.distributed_model(nn.Linear(2, 1))
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> optimizer = fleet.distributed_optimizer(optimizer)
        >>> fleet.save_persistables("checkpoint")
        >>> fleet.load_persistables("checkpoint")
        {}
    """
    _refuse_old_form("load_persistables", dirname, others)
    check_via(via)
    job = current()
    job.refuse_in_server("load_persistables")
    _check_program("load_persistables", program, job)
    return load_job(job, dirname, via)


def _save(job: Job, dirname: Directory, extra: Mapping[str, Any], how: SaveOptions) -> None:
    model = registered_model(job)
    if not job.optimizers and job.group.index == 0:
        logger.warning(
            "save_persistables: no optimizer is registered, so no optimizer state is saved; if the "
            "script has one, add optimizer = fleet.distributed_optimizer(optimizer)"
        )
    with job.at_rest():
        report_positions(job)
        job.group.assemble("save_persistables")
        local_training.average_with_states(job, "save_persistables")
        workers = _workers(job)

        def save() -> None:
            job.finish_background_save()
            snapshot = _snapshot(job, model, workers, extra)
            _write_now_or_later(job, model, dirname, snapshot, how)

        job.group.together(save if job.group.index == 0 else None, "save_persistables")


def save_together(job: Job, dirname: Directory, how: SaveOptions) -> None:
    """Save without `extra`; every worker calls it after the same step."""
    _save(job, dirname, {}, how)


def save_alone(job: Job, dirname: Directory, how: SaveOptions) -> None:
    """Save where no worker waits for another: worker 0 saves the present values of the servers.

    The random numbers of the other workers are not in it.
    """
    with job.at_rest():
        if job.group.index:
            return
        # records that the others have not reported yet are dealt out again after a resume
        report_positions(job)
        job.finish_background_save()
        model = registered_model(job)
        snapshot = _snapshot(job, model, [worker_record(job)], {})
        _write_now_or_later(job, model, dirname, snapshot, how)


def _write_now_or_later(
    job: Job, model: nn.Module, dirname: Directory, snapshot: JobSnapshot, how: SaveOptions
) -> None:
    write = functools.partial(_write, keep=job.strategy.checkpoint_configs.keep, role=job.role)
    bases = how.bases(dirname)
    if not how.background:
        while not _try_write(write, dirname, snapshot, job.server_snapshot(model, how.via, bases)):
            pass
        return
    cut = job.server_snapshot(model, how.via, bases)
    try:
        if cut is not None:
            snapshot = cut.complete(snapshot)
        # the script may change its working directory during the write
        target = absolute(dirname)
        later = functools.partial(_write_and_drop, write, target, snapshot.detached(), cut)
        job.background_save.start(later, f"save into {dirname} at step {job.step}")
        cut = None
    finally:
        if cut is not None:
            cut.drop()


def _try_write(
    write: _Write, dirname: Directory, snapshot: JobSnapshot, cut: ServerSnapshot | None
) -> bool:
    """Write a checkpoint; returns False if a server died and the save must start again.

    The next request waits for the restarted server, which has lost its files of this save.
    """
    if cut is None:
        write(dirname, snapshot)
        return True
    try:
        whole = cut.complete(snapshot)
        try:
            write(dirname, whole)
        except PeerLostError as lost:
            if not cut.can_retry:
                raise
            logger.warning("restarting the save into %s: %s", dirname, lost)
            return False
    finally:
        cut.drop()
    return True


def _write_and_drop(
    write: _Write, dirname: Directory, snapshot: JobSnapshot, cut: ServerSnapshot | None
) -> None:
    try:
        write(dirname, snapshot)
    finally:
        if cut is not None:
            cut.drop()


def _snapshot(
    job: Job, model: nn.Module, workers: Sequence[WorkerState], extra: Mapping[str, Any]
) -> JobSnapshot:
    return checkpoint.JobSnapshot(
        model=checkpoint.model_state(model),
        optimizers=[
            checkpoint.optimizer_state(managed.optimizer, names_of(model))
            for managed in job.optimizers
        ],
        workers=workers,
        seed=job.strategy.seed,
        step=job.step,
        extra=extra,
    )


def _workers(job: Job) -> list[WorkerState]:
    """The records of all workers, on worker 0."""
    mine = worker_record(job)
    sent = b"" if job.group.index == 0 else mine.to_bytes()
    _, *others = job.group.bytes_to_first(sent, "save_persistables") or [b""]
    states = [mine, *map(checkpoint.WorkerState.from_bytes, others)]
    # number them again: a worker may have been lost
    return [dataclasses.replace(one, rank=rank) for rank, one in enumerate(states)]


def _write(dirname: Directory, snapshot: JobSnapshot, keep: int, role: Role) -> None:
    checkpoint.write(dirname, snapshot, keep=keep)
    logger.info("saved %s at step %d", dirname, snapshot.step)
    note(role, "checkpoint", f"saved {dirname} at step {snapshot.step}", snapshot.step)


def _check_program(name: str, program: Any, job: Job) -> None:
    """ConfigError unless the checkpoint contains the model of the program."""
    if program is None:
        return
    model = getattr(program, "model", None)
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"fleet.{name}: got program={program!r:.80}, expected a static.Program that trains a "
            f"registered model; write fleet.{name}(dirname), or program.save(dirname) for a "
            "program without its model"
        )
    if not any(has_all_of(managed.module, model) for managed in job.models):
        raise ConfigError(
            f"fleet.{name}: the model of the program is not registered, so it is not in the "
            "checkpoint; write the program with the optimizer that fleet.distributed_optimizer "
            "returned, or add model = fleet.distributed_model(model)"
        )


def _refuse_old_form(name: str, dirname: Any, others: tuple[Any, ...]) -> None:
    if others or not isinstance(dirname, (str, os.PathLike)):
        got = ", ".join(type(value).__name__ for value in (dirname, *others))
        why = "" if not others else "; it takes no executor"
        raise ConfigError(
            f"fleet.{name}: got ({got}), expected a folder{why}: write fleet.{name}(dirname)"
        )
