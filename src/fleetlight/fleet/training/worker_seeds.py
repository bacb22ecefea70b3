# SPDX-License-Identifier: Apache-2.0
"""Torch's random numbers in training: each worker draws its own, so dropout masks differ.

Scripts seed all workers alike, often after `fleet.init`. Initial values and the order of records
rely on that. So nothing changes before training begins: at a training forward of a registered
model, when a sharded loader begins, and at an optimizer's step, every worker but worker 0 replaces
the seed of the script by one derived from it and the worker's index. Until then, parts of a model
that may draw do the same at their training forward, for those who call the model in parts.

A derived seed carries a mark, and generators keep their seed in their state. So a state that comes
from a checkpoint, or from `torch.utils.checkpoint` amid a backward, goes on as it is; and a script
that seeds again gets numbers of its own again. No other record of what was done is needed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from fleetlight.fleet.job import Job
from fleetlight.static.graph.variable import is_written
from fleetlight.torch_compat.modules import Dropout

#: torch's generator on a CPU uses the lower 32 bits of a seed only; the mark is above them
_LOW_BITS = 40
_MARK = 0x464C54


def make_distinct(job: Job) -> None:
    """Derive this worker's seeds from those of the script, where the strategy asks for that."""
    worker = job.group.index
    if worker == 0 or job.strategy.worker_seeds != "distinct":
        return
    seed = torch.initial_seed()
    if not _is_derived(seed):
        torch.manual_seed(derived_seed(seed, worker))  # those of all devices
    elif torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        seed = torch.cuda.initial_seed()
        if not _is_derived(seed):
            torch.cuda.manual_seed_all(derived_seed(seed, worker))


def derived_seed(seed: int, worker: int) -> int:
    """The seed that takes the place of the script's on a worker: the same in every run."""
    digest = hashlib.sha256(f"{seed}/{worker}".encode()).digest()
    return _MARK << _LOW_BITS | int.from_bytes(digest[: _LOW_BITS // 8], "little")


#: modules of torch that draw; dropout of a transformer's layer is a part of it
_DRAWING = (Dropout, nn.RNNBase, nn.MultiheadAttention, nn.RReLU)


class Parts:
    """Looks out for the first training forward of a part of a model that may draw.

    Those are the modules of torch that do, and all that others have written. Modules are as they
    were before once training has begun.
    """

    def __init__(self, module: nn.Module, begin: Callable[[], None]) -> None:
        hook = _Hook(self, begin)
        self._hooks = [
            part.register_forward_pre_hook(hook, with_kwargs=True)
            for part in module.modules()
            # the forward of the module itself is watched by the plan
            if part is not module and _may_draw(part)
        ]

    def close(self) -> None:
        """Look out no more."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()


class _Hook:
    """Called before the forward of a part; a copy of the part gets one that does nothing."""

    def __init__(self, parts: Parts, begin: Callable[[], None]) -> None:
        self._parts, self._begin = parts, begin

    def __call__(self, part: nn.Module, args: Any, kwargs: Any) -> None:
        # a compiler would take the change of seeds for a part of the model
        is_traced = torch.compiler.is_compiling() or is_written(args, kwargs)
        # not by the attribute: a program that is being written notes who looks at it
        if not is_traced and vars(part).get("training", True):
            self._parts.close()
            self._begin()

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return _nothing

    def __reduce__(self) -> Any:
        return _of_a_copy, ()


def _of_a_copy() -> Callable[..., None]:
    return _nothing


def _nothing(part: nn.Module, args: Any, kwargs: Any) -> None:
    """The hook of a copied module."""


def _may_draw(part: nn.Module) -> bool:
    if isinstance(part, torch.jit.ScriptModule):
        return False  # takes no hooks
    return isinstance(part, _DRAWING) or not type(part).__module__.startswith("torch.nn.")


def _is_derived(seed: int) -> bool:
    return seed >> _LOW_BITS == _MARK
