# SPDX-License-Identifier: Apache-2.0
"""`LocalDense`: dense parameters that a worker steps itself, and the servers average.

A worker brings what a step has taught it, divided by the number of workers; the servers add that.
The answer holds the mean of all workers. Until it is there, the worker's own progress counts as a
whole: it stands for what all workers learn meanwhile, so a late answer is no late gradient.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from fleetlight.ps.dtypes import as_tensor, flat_array
from fleetlight.ps.placement import Block
from fleetlight.ps.worker.client import Client, ReplyValues
from fleetlight.ps.worker.local_parameters import LocalParameters

Array = NDArray[Any]


class LocalDense:
    """Used by the thread that trains. Live values are the servers', and what came on top."""

    def __init__(self, client: Client, live: LocalParameters) -> None:
        self._live, self._workers = live, client.worker_num
        servers = range(client.server_num) if client.plan.serves_dense else ()
        #: by server, in the order in which they travel
        self._blocks: dict[int, list[_LocalBlock]] = {
            server: [_LocalBlock(block, live) for block in client.placement.blocks_of(server)]
            for server in servers
        }
        #: of each push without an answer: which blocks learned what
        self._pending: deque[list[tuple[_LocalBlock, Tensor]]] = deque()

    def begin(self) -> None:
        """The live values are the servers', and nothing is on its way."""
        self._pending.clear()
        for blocks in self._blocks.values():
            for held in blocks:
                held.since = held.packed()

    def share(self, optimizer: int, *, just_taken: bool = False) -> dict[int, list[Array]]:
        """What this worker has learned with one optimizer since, divided by the workers.

        `just_taken`: nothing was learned after the last `take`, which knows the progress.
        """
        shares: dict[int, list[Array]] = {}
        learned: list[tuple[_LocalBlock, Tensor]] = []
        for server, blocks in self._blocks.items():
            for held in blocks:
                if held.block.optimizer == optimizer:
                    progress = held.learned(just_taken)
                    learned.append((held, progress))
                    shares.setdefault(server, []).append(flat_array(progress / self._workers))
        self._pending.append(learned)
        return shares

    def skipped(self) -> None:
        """A push brings nothing."""
        self._pending.append([])

    def take(self, values: ReplyValues, answered: int) -> None:
        """Go on from the servers' values, with what so many answers do not hold yet on top."""
        for _ in range(answered):
            self._pending.popleft()
        pending = [one for learned in self._pending for one in learned]
        for server, arrays in values.dense.items():
            for held, array in zip(self._blocks[server], arrays, strict=True):
                on_top = [progress for other, progress in pending if other is held]
                held.rebase(as_tensor(array, held.dtype), on_top)
        self._live.note()


class _LocalBlock:
    """A block here."""

    def __init__(self, block: Block, live: LocalParameters) -> None:
        self.block, self._live = block, live
        self.dtype: torch.dtype = getattr(torch, block.dtype)
        #: the live values when they were brought last, or taken since
        self.since = torch.empty(0)
        #: what the last rebase has put on top
        self._on_top: Tensor | None = None

    def packed(self) -> Tensor:
        """The live values, in memory of their own."""
        return as_tensor(self._live.pack(self.block), self.dtype)

    def learned(self, just_taken: bool) -> Tensor:
        """What was learned since, which is brought now."""
        progress, self._on_top = self._on_top, None
        if progress is None or not just_taken:
            packed = self.packed()
            progress, self.since = packed - self.since, packed
        else:
            self.since += progress
        return progress

    def rebase(self, now: Tensor, on_top: Sequence[Tensor]) -> None:
        """Take the servers' values; what they do not hold yet stays on top."""
        progress = self.packed().sub_(self.since)
        self.since.copy_(now)
        for one in on_top:
            self.since += one
        self._live.unpack(self.block, flat_array(self.since + progress))
        self._on_top = progress
