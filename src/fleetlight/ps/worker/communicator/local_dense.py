# SPDX-License-Identifier: Apache-2.0
"""`LocalDense`: dense parameters that each worker steps itself and the servers average.

A worker pushes the difference of a step divided by the number of workers, and the servers add it.
The reply has the mean of all workers. Until it arrives the worker keeps its own difference in full:
it stands for the steps of all workers, so a late reply is no stale gradient.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fleetlight.kernels import difference, rebase
from fleetlight.ps.dtypes import as_tensor, flat_array
from fleetlight.ps.placement import Block
from fleetlight.ps.wire_forms import Output, no_output
from fleetlight.ps.worker.client import Client
from fleetlight.ps.worker.local_parameters import LocalParameters
from fleetlight.ps.worker.reply_values import ReplyValues

Array = NDArray[Any]


class LocalDense:
    """Used by the training thread. Local values are the servers' plus the pending differences."""

    def __init__(self, client: Client, live: LocalParameters) -> None:
        self._live, self._client = live, client
        servers = range(client.server_num) if client.plan.serves_dense else ()
        #: by server, in wire order
        self._blocks: dict[int, list[_LocalBlock]] = {
            server: [_LocalBlock(block, live) for block in client.placement.blocks_of(server)]
            for server in servers
        }
        #: the differences of each push without a reply
        self._pending: deque[list[tuple[_LocalBlock, Tensor]]] = deque()

    def begin(self) -> None:
        """Start from the servers' values, with no push in flight."""
        self._pending.clear()
        for blocks in self._blocks.values():
            for held in blocks:
                held.since = held.packed()

    def share(
        self,
        optimizer: int,
        *,
        just_taken: bool = False,
        memory: Sequence[Output] | None = None,
    ) -> dict[int, list[Array]]:
        """The differences of one optimizer since the last push, divided by the workers.

        `just_taken`: no step followed the last `take`, which knows the differences. `memory` is
        that of each server's blocks.
        """
        shares: dict[int, list[Array]] = {}
        learned: list[tuple[_LocalBlock, Tensor]] = []
        for server, blocks in self._blocks.items():
            for held in blocks:
                if held.block.optimizer == optimizer:
                    progress = held.learned(just_taken)
                    learned.append((held, progress))
                    output = no_output if memory is None else memory[server]
                    shares.setdefault(server, []).append(self._part(progress, output))
        self._pending.append(learned)
        return shares

    def _part(self, progress: Tensor, output: Output) -> Array:
        """This worker's part of the mean."""
        memory = output(tuple(progress.shape), flat_array(progress).dtype.name)
        workers = self._client.active
        if memory is None and workers == 1:
            return flat_array(progress)
        into = None if memory is None else as_tensor(memory, progress.dtype)
        return flat_array(torch.div(progress, workers, out=into))

    def skipped(self) -> None:
        """Record a push without differences."""
        self._pending.append([])

    def take(self, values: ReplyValues, answered: int) -> None:
        """Take the servers' values and add the pending differences of pushes without a reply."""
        for _ in range(answered):
            self._pending.popleft()
        pending = [one for learned in self._pending for one in learned]
        for server, arrays in values.dense.items():
            for held, array in zip(self._blocks[server], arrays, strict=True):
                on_top = [progress for other, progress in pending if other is held]
                held.rebase(array, on_top)
        self._live.note()


class _LocalBlock:
    """A block of local values. Kernels handle float32 in main memory, torch all else."""

    def __init__(self, block: Block, live: LocalParameters) -> None:
        self.block, self._live = block, live
        self.dtype: torch.dtype = getattr(torch, block.dtype)
        #: the local values after the last push or `take`
        self.since = torch.empty(0)
        #: the differences that the last rebase added
        self._on_top: Tensor | None = None

    def packed(self) -> Tensor:
        """A copy of the local values."""
        return as_tensor(self._live.pack(self.block), self.dtype)

    def learned(self, just_taken: bool) -> Tensor:
        """The difference since the last push."""
        progress, self._on_top = self._on_top, None
        if progress is not None and just_taken:
            self.since += progress
            return progress
        if (views := self._views()) is None:
            packed = self.packed()
            progress, self.since = packed - self.since, packed
            return progress
        progress, since = torch.empty(self.block.size, dtype=self.dtype), self.since.numpy()
        out = progress.numpy()
        for place, local in views:
            difference(local, since[place], out[place])
        return progress

    def rebase(self, now: Array, on_top: Sequence[Tensor]) -> None:
        """Take the servers' values and add the pending differences."""
        if (views := self._views()) is None:
            self._on_top = self._rebased_by_torch(as_tensor(now, self.dtype), on_top)
            return
        self._on_top, since = torch.empty(self.block.size, dtype=self.dtype), self.since.numpy()
        pending, out = _sum_of(on_top), self._on_top.numpy()
        for place, local in views:
            rebase(local, since[place], now[place], pending[place], out[place])

    def _views(self) -> list[tuple[slice, NDArray[Any]]] | None:
        return self._live.views(self.block) if self.dtype == torch.float32 else None

    def _rebased_by_torch(self, now: Tensor, on_top: Sequence[Tensor]) -> Tensor:
        progress = self.packed().sub_(self.since)
        self.since.copy_(now)
        for one in on_top:
            self.since += one
        self._live.unpack(self.block, flat_array(self.since + progress))
        return progress


def _sum_of(differences: Sequence[Tensor]) -> NDArray[Any]:
    """The sum of pending differences; empty without any."""
    if not differences:
        return np.empty(0, np.float32)
    total = differences[0]
    for one in differences[1:]:
        total = total + one
    return total.numpy()
