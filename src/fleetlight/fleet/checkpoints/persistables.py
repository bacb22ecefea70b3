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
from fleetlight.checkpoint import Snapshot, WorkerState
from fleetlight.errors import ConfigError, PeerLostError, names_arguments
from fleetlight.fleet.checkpoints.loading import load_job
from fleetlight.fleet.checkpoints.worker_state import saved_values
from fleetlight.fleet.context import Context, current
from fleetlight.fleet.job import Purpose
from fleetlight.fleet.served.shard_queue import tell_positions
from fleetlight.fleet.served.tables.server_checkpoint import ServedCut
from fleetlight.fleet.served.tables.table_files import FOLDER, check_via
from fleetlight.fleet.training import local_training
from fleetlight.fleet.training.registered import (
    has_all_of,
    names_of,
    refuse_in_server,
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
    context = current()
    refuse_in_server(context, "save_persistables")
    _check_program("save_persistables", program, context)
    _save(context, dirname, extra or {}, background=background, via=via)


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
    context = current()
    refuse_in_server(context, "load_persistables")
    _check_program("load_persistables", program, context)
    return load_job(context, dirname, via)


def _save(
    context: Context,
    dirname: Directory,
    extra: Mapping[str, Any],
    *,
    background: bool = False,
    via: str = FOLDER,
) -> None:
    model = registered_model(context)
    if not context.optimizers and context.group.index == 0:
        logger.warning(
            "save_persistables: no optimizer is registered, so no optimizer state is saved; if "
            "there is one, add optimizer = fleet.distributed_optimizer(optimizer)"
        )
    with context.at_rest():
        tell_positions(context)
        context.group.assemble("save_persistables")
        local_training.settle(context, "save_persistables")
        workers = _workers(context)

        def save() -> None:
            _finish_before_another(context)
            snapshot = _snapshot(context, model, workers, extra)
            _write_now_or_later(context, model, dirname, snapshot, background=background, via=via)

        context.group.together(save if context.group.index == 0 else None, "save_persistables")


def save_together(
    context: Context, dirname: Directory, *, background: bool = False, via: str = FOLDER
) -> None:
    """What a job saves by itself; all workers come here behind the same step."""
    _save(context, dirname, {}, background=background, via=via)


def save_alone(
    context: Context, dirname: Directory, *, background: bool = False, via: str = FOLDER
) -> None:
    """The same where no worker waits for another: worker 0 saves what is on the servers by now.

    What the others have of their own, random numbers, is not in it.
    """
    with context.at_rest():
        if context.group.index:
            return
        # what the others have not told yet is dealt out again by whoever goes on from here
        tell_positions(context)
        _finish_before_another(context)
        model = registered_model(context)
        snapshot = _snapshot(context, model, [_worker_state(context)], {})
        _write_now_or_later(context, model, dirname, snapshot, background=background, via=via)


def _finish_before_another(context: Context) -> None:
    """Wait for the write before; where a server has died over it, this save takes its place."""
    session = context.session
    comes_back = session is not None and session.client.waits_for_comebacks
    context.saving.finish(forgives=PeerLostError if comes_back else None)


def _write_now_or_later(
    context: Context,
    model: nn.Module,
    dirname: Directory,
    snapshot: Snapshot,
    *,
    background: bool,
    via: str,
) -> None:
    if not background:
        while not _is_written(dirname, snapshot, context.cut(model, via)):
            pass
        return
    cut = context.cut(model, via)
    try:
        if cut is not None:
            snapshot = cut.completed(snapshot)
        # the script may change its working directory meanwhile
        target = Path(dirname).absolute()
        write = functools.partial(_write_and_drop, target, snapshot.detached(), cut)
        context.saving.start(write, f"save into {dirname} at step {context.step}")
        cut = None
    finally:
        if cut is not None:
            cut.drop()


def _is_written(dirname: Directory, snapshot: Snapshot, cut: ServedCut | None) -> bool:
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


def _write_and_drop(dirname: Directory, snapshot: Snapshot, cut: ServedCut | None) -> None:
    try:
        _write(dirname, snapshot)
    finally:
        if cut is not None:
            cut.drop()


def _snapshot(
    context: Context, model: nn.Module, workers: Sequence[WorkerState], extra: Mapping[str, Any]
) -> Snapshot:
    return Snapshot(
        model=checkpoint.model_state(model),
        optimizers=[
            checkpoint.optimizer_state(plan.optimizer, names_of(model))
            for plan in context.optimizers
        ],
        workers=workers,
        seed=context.strategy.seed,
        step=context.step,
        extra=extra,
    )


def _workers(context: Context) -> list[WorkerState]:
    """The states of all workers, on worker 0, whose own does not travel."""
    mine = _worker_state(context)
    told = b"" if context.group.index == 0 else mine.to_bytes()
    _, *others = context.group.bytes_to_first(told, "save_persistables") or [b""]
    states = [mine, *map(WorkerState.from_bytes, others)]
    # one may have been lost
    return [dataclasses.replace(one, rank=rank) for rank, one in enumerate(states)]


def _write(dirname: Directory, snapshot: Snapshot) -> None:
    checkpoint.write(dirname, snapshot)
    logger.info("saved %s at step %d", dirname, snapshot.step)


def _worker_state(context: Context) -> WorkerState:
    also = () if context.stopping is None else (Purpose.RESUME,)
    return WorkerState(
        rank=context.group.index,
        rng=checkpoint.rng_state(),
        values=saved_values(context, Purpose.CHECKPOINT, *also),
    )


def _check_program(name: str, program: Any, context: Context) -> None:
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
    if not any(has_all_of(plan.module, model) for plan in context.models):
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
