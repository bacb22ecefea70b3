# SPDX-License-Identifier: Apache-2.0
"""Torch's random numbers in training: each worker draws its own, so dropout masks differ.

Scripts seed all workers alike, often after `fleet.init`. Initial values and the order of records
rely on that, so nothing changes before training begins. Then every worker but worker 0 replaces the
seed of the script by one derived from it and the worker's index: at a training forward of a
registered model, when a sharded loader begins, and at an optimizer's step. Where a script calls the
model in parts, the first training forward of a part that may use random numbers does the same.

A derived seed carries a mark, and generators keep their seed in their state. So a state that comes
from a checkpoint, or from `torch.utils.checkpoint` during backward, stays as it is, and a new seed
of the script is derived again. No other record is needed.
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

#: torch's CPU generator uses only the lower 32 bits of a seed; the mark is above them
_LOW_BITS = 40
_MARK = 0x464C54


def derive_worker_seeds(job: Job) -> None:
    """Derive this worker's seeds from those of the script, where the strategy asks for it."""
    worker = job.group.index
    if worker == 0 or job.strategy.worker_seeds != "distinct":
        return
    seed = torch.initial_seed()
    if not _is_derived(seed):
        torch.manual_seed(derived_seed(seed, worker))  # on all devices
    elif torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        seed = torch.cuda.initial_seed()
        if not _is_derived(seed):
            torch.cuda.manual_seed_all(derived_seed(seed, worker))


def derived_seed(seed: int, worker: int) -> int:
    """The seed of a worker; it is the same in every run."""
    digest = hashlib.sha256(f"{seed}/{worker}".encode()).digest()
    return _MARK << _LOW_BITS | int.from_bytes(digest[: _LOW_BITS // 8], "little")


#: modules of torch that use random numbers; the dropout of a transformer layer is a module in it
_RANDOM = (Dropout, nn.RNNBase, nn.MultiheadAttention, nn.RReLU)


class ForwardWatcher:
    """Watches for the first training forward of a part that may use random numbers.

    Those are some modules of torch, and all modules of other authors. The hooks are removed once
    training begins.
    """

    def __init__(self, module: nn.Module, begin: Callable[[], None]) -> None:
        hook = _Hook(self, begin)
        self._hooks = [
            part.register_forward_pre_hook(hook, with_kwargs=True)
            for part in module.modules()
            # the model's entry watches the forward of the module itself
            if part is not module and _may_be_random(part)
        ]

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()


class _Hook:
    """Runs before the forward of a part; in a copy of the part it does nothing."""

    def __init__(self, parts: ForwardWatcher, begin: Callable[[], None]) -> None:
        self._parts, self._begin = parts, begin

    def __call__(self, part: nn.Module, args: Any, kwargs: Any) -> None:
        # a compiler would make the change of seeds a part of the model
        is_traced = torch.compiler.is_compiling() or is_written(args, kwargs)
        # past the attribute: a program in the making notes each access to it
        if not is_traced and vars(part).get("training", True):
            self._parts.close()
            self._begin()

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return _skip

    def __reduce__(self) -> Any:
        return _no_hook, ()


def _no_hook() -> Callable[..., None]:
    return _skip


def _skip(part: nn.Module, args: Any, kwargs: Any) -> None:
    """The hook of a copied module."""


def _may_be_random(part: nn.Module) -> bool:
    if isinstance(part, torch.jit.ScriptModule):
        return False  # takes no hooks
    return isinstance(part, _RANDOM) or not type(part).__module__.startswith("torch.nn.")


def _is_derived(seed: int) -> bool:
    return seed >> _LOW_BITS == _MARK
