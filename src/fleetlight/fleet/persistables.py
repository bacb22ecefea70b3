# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of the whole job, and models for inference."""

from __future__ import annotations

import functools
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fleetlight import checkpoint
from fleetlight.checkpoint import Checkpoint, InferenceModel, Snapshot, WorkerState
from fleetlight.errors import CheckpointError, ConfigError, PlanError
from fleetlight.fleet.context import Context, current
from fleetlight.fleet.courier import carry_checkpoint
from fleetlight.fleet.model import as_plain_module
from fleetlight.observe.log import logger

Directory = str | os.PathLike[str]


def save_persistables(
    dirname: Directory,
    *others: Any,
    extra: Mapping[str, Any] | None = None,
    background: bool = False,
) -> None:
    """Save model, optimizer, positions of the loaders and random numbers; every worker calls it.

    Worker 0 writes; nobody else needs the path. A failed save leaves the checkpoint that was
    there before, and is an error on every worker. `extra` comes back from `load_persistables`.

    With `background=True` the values are those at the call, and are written while training goes
    on. The next save or load, `stop_worker` and the end of the script wait for the write, and
    raise its failure.
    """
    _refuse_old_form("save_persistables", dirname, others)
    context = current()
    model = _model(context)
    if not context.optimizers and context.group.index == 0:
        logger.warning(
            "save_persistables: no optimizer is registered, so no optimizer state is saved; if "
            "there is one, add optimizer = fleet.distributed_optimizer(optimizer)"
        )
    context.group.assemble("save_persistables")
    workers = context.group.gather_bytes(_worker_state(context).to_bytes(), "save_persistables")

    def save() -> None:
        context.saving.finish()
        snapshot = _snapshot(context, model, workers, extra or {})
        if not background:
            _write(dirname, snapshot)
            return
        # the script may change its working directory meanwhile
        write = functools.partial(_write, Path(dirname).absolute(), snapshot.detached())
        context.saving.start(write, f"save into {dirname} at step {context.step}")

    context.group.together(save if context.group.index == 0 else None, "save_persistables")


def load_persistables(dirname: Directory, *others: Any) -> dict[str, Any]:
    """Load what `save_persistables` wrote, by any number of workers; every worker calls it.

    Workers that cannot read the path get the checkpoint from worker 0. Answers `extra`.
    """
    _refuse_old_form("load_persistables", dirname, others)
    context = current()
    model = _model(context)
    context.group.assemble("load_persistables")
    # what is to be read may still be under way
    context.group.together(context.saving.finish, "load_persistables")
    with tempfile.TemporaryDirectory(prefix="fleet-load-") as temporary:
        path = carry_checkpoint(context.group, Path(dirname), Path(temporary))
        found: list[Checkpoint] = []
        steps: list[Callable[[], None]] = []

        def fit() -> None:
            found.append(checkpoint.read(path))
            steps.extend(_fitted(context, model, found[0]))

        def load() -> None:
            for step in steps:
                step()

        # what does not fit on one worker must change nothing on any
        context.group.together(fit, "load_persistables")
        context.group.together(load, "load_persistables")
        return found[0].extra


def save_inference_model(
    dirname: Directory,
    example_inputs: tuple[Tensor, ...] | Mapping[str, Tensor] | Tensor,
    model: nn.Module | None = None,
    *,
    dynamic_batch: bool | list[str] = True,
) -> None:
    """Export the model for inference; worker 0 writes, on the others it does nothing.

    What is written runs with `load_inference_model` alone: no job, no class of the model.
    """
    context = current()
    if context.group.index != 0:
        return
    examples = (example_inputs,) if isinstance(example_inputs, Tensor) else example_inputs
    module = model or _model(context)
    with as_plain_module(module):
        checkpoint.save_inference(dirname, module, examples, dynamic_batch=dynamic_batch)


def load_inference_model(dirname: Directory, device: str | torch.device = "cpu") -> InferenceModel:
    """A callable that computes what the exported model computes. Needs no `fleet.init`."""
    return checkpoint.load_inference(dirname, device)


def _model(context: Context) -> nn.Module:
    """The registered model; several become one, their names starting with their number."""
    if not context.models:
        raise PlanError("no model is registered; add model = fleet.distributed_model(model) before")
    modules = [plan.module for plan in context.models]
    return modules[0] if len(modules) == 1 else nn.ModuleList(modules)


def _names(model: nn.Module) -> dict[nn.Parameter, str]:
    return {parameter: name for name, parameter in model.named_parameters()}


def _snapshot(
    context: Context, model: nn.Module, workers: Sequence[bytes], extra: Mapping[str, Any]
) -> Snapshot:
    return Snapshot(
        model=checkpoint.model_state(model),
        optimizers=[
            checkpoint.optimizer_state(plan.optimizer, _names(model)) for plan in context.optimizers
        ],
        workers=[WorkerState.from_bytes(data) for data in workers],
        seed=context.strategy.seed,
        step=context.step,
        extra=extra,
    )


def _write(dirname: Directory, snapshot: Snapshot) -> None:
    checkpoint.write(dirname, snapshot)
    logger.info("saved %s at step %d", dirname, snapshot.step)


def _worker_state(context: Context) -> WorkerState:
    return WorkerState(
        rank=context.group.index,
        rng=checkpoint.rng_state(),
        values={
            "loaders": [loader.state_dict() for loader in context.loaders],
            "scalers": [plan.scaler_state() for plan in context.optimizers],
        },
    )


def _fitted(context: Context, model: nn.Module, saved: Checkpoint) -> Iterator[Callable[[], None]]:
    """Read and compare everything; answers the steps that then put it in place."""
    optimizers = saved.optimizers()
    if len(optimizers) != len(context.optimizers):
        raise CheckpointError(
            f"{saved.directory} holds {len(optimizers)} optimizers, but this job has "
            f"{len(context.optimizers)}; register the same ones before loading"
        )
    # what may still refuse comes first: positions can be taken back
    yield from _fitted_positions(context, saved)
    yield checkpoint.fitted_model_state(model, saved.model())
    for plan, state in zip(context.optimizers, optimizers, strict=True):
        yield checkpoint.fitted_optimizer_state(plan.optimizer, _names(model), state)
    yield functools.partial(setattr, context, "step", saved.manifest.step)
    yield _fitted_rng(context, saved)


def _fitted_positions(context: Context, saved: Checkpoint) -> Iterator[Callable[[], None]]:
    """Positions of loaders and loss scales are those of the whole job: worker 0 has saved them."""
    zero = saved.worker(0)
    if zero is None:
        return
    positions = zero.values.get("loaders", [])
    if len(positions) != len(context.loaders):
        logger.warning(
            "the checkpoint knows the positions of %d loaders, this job has %d sharded so far: "
            "positions are not restored; call fleet.shard before load_persistables",
            len(positions),
            len(context.loaders),
        )
    else:
        yield functools.partial(_load_positions, context, positions)
    for plan, scaler in zip(context.optimizers, zero.values.get("scalers", []), strict=False):
        yield functools.partial(plan.load_scaler_state, scaler)


def _load_positions(context: Context, positions: list[Any]) -> None:
    """Give every loader its position, or change none."""
    before = [loader.state_dict() for loader in context.loaders]
    try:
        for loader, position in zip(context.loaders, positions, strict=True):
            loader.load_state_dict(position)
    except Exception:
        for loader, position in zip(context.loaders, before, strict=True):
            loader.load_state_dict(position)
        raise


def _fitted_rng(context: Context, saved: Checkpoint) -> Callable[[], None]:
    """Random numbers are each worker's own."""
    mine = saved.worker(context.group.index)
    if mine is not None and mine.rng is not None:
        return functools.partial(checkpoint.set_rng_state, mine.rng)
    return functools.partial(
        logger.warning,
        "the checkpoint has no random-number state for this worker; it keeps its own",
    )


def _refuse_old_form(name: str, dirname: Any, others: tuple[Any, ...]) -> None:
    if others or not isinstance(dirname, (str, os.PathLike)):
        got = ", ".join(type(value).__name__ for value in (dirname, *others))
        raise ConfigError(
            f"fleet.{name}: got ({got}); there is no executor to pass here, "
            f"write fleet.{name}(dirname)"
        )
