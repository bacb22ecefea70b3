# SPDX-License-Identifier: Apache-2.0
"""Torch's random numbers in training: each worker draws its own, so dropout masks differ.

Scripts seed all workers alike, often after `fleet.init`. Initial values and the order of records
rely on that. So nothing changes before training begins: at a training forward of a registered
model, and when a sharded loader begins, every worker but worker 0 replaces the seed of the script
by one derived from it and the worker's index.

A derived seed carries a mark, and generators keep their seed in their state. So a state that comes
from a checkpoint, or from `torch.utils.checkpoint` amid a backward, goes on as it is; and a script
that seeds again gets numbers of its own again. No other record of what was done is needed.
"""

from __future__ import annotations

import hashlib

import torch

from fleetlight.fleet.context import Context

#: torch's generator on a CPU uses the lower 32 bits of a seed only; the mark is above them
_LOW_BITS = 40
_MARK = 0x464C54


def make_distinct(context: Context) -> None:
    """Derive this worker's seeds from those of the script, where the strategy asks for that."""
    worker = context.group.index
    if worker == 0 or context.strategy.worker_seeds != "distinct":
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


def _is_derived(seed: int) -> bool:
    return seed >> _LOW_BITS == _MARK
