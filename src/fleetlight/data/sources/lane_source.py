# SPDX-License-Identifier: Apache-2.0
"""`LaneSource`: records in windows, of which each worker reads its own."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from torch.utils.data import DataLoader

from fleetlight.data.order.blocks import Interval
from fleetlight.data.order.lanes import LanePart, Lanes
from fleetlight.data.order.window_order import WindowOrder
from fleetlight.data.sources.sampler import ShardBatches
from fleetlight.data.sources.source import Dealt, RecordSource, Shard
from fleetlight.data.sources.windows import WindowSampler
from fleetlight.errors import CheckpointError
from fleetlight.kernels.arrays import Ids


class LaneSource(RecordSource):
    """A position says what was dealt out, since when and to how many workers, and how much of it.

    So the same number of workers resumes exactly, and any other number shares what is left.
    """

    def __init__(self, loader: DataLoader[Any], sampler: WindowSampler, shard: Shard) -> None:
        self._sampler, self._shard = sampler, shard
        self._batch, self._tail = loader.batch_size or 1, "drop" if loader.drop_last else shard.tail
        self._batches = ShardBatches()
        self._order: WindowOrder | None = None
        self._consumed = 0
        #: positions that were left after `_since` records, and dealt to (workers, batch)
        self._left: list[Interval] | None = None
        self._since, self._dealt = 0, self._own
        #: parts of the batches that torch has taken and not loaded yet
        self._taken: deque[LanePart] = deque()
        #: by the position before them: the last batches loaded
        self._records: dict[int, Ids] = {}

    @property
    def _own(self) -> tuple[int, int]:
        return self._shard.workers, self._batch

    def arguments(self) -> dict[str, Any]:
        return {"batch_sampler": self._batches}

    def steps(self) -> int:
        return self._shard.cut(len(self._sampler), self._batch, drop=self._tail == "drop").steps()

    @property
    def order_name(self) -> str:
        return self._sampler.order_name

    def settings(self) -> dict[str, object]:
        return {**self._sampler.settings(), "drop_last": self._tail == "drop"}

    @property
    def position(self) -> dict[str, Any]:
        left = None if self._left is None else [list(one) for one in self._left]
        return {
            "consumed": self._consumed,
            "left": left,
            "since": self._since,
            "dealt": list(self._dealt),
        }

    @position.setter
    def position(self, position: Mapping[str, Any]) -> None:
        consumed = int(position.get("consumed", 0))
        left = position.get("left") if consumed else None
        self._consumed = consumed
        self._left = None if left is None else [(int(low), int(high)) for low, high in left]
        self._since = int(position.get("since", 0))
        workers, batch = position.get("dealt", self._own)
        self._dealt = int(workers), int(batch)

    def is_at_end(self, position: Mapping[str, Any]) -> bool:
        consumed = int(position["consumed"])
        blocks = self._shard.cut(len(self._sampler), self._batch, drop=self._tail == "drop")
        return consumed > 0 and blocks.steps(consumed) == 0

    def begin(self, epoch: int, seed: int) -> None:
        order = self._order = self._sampler.order(seed, epoch)
        if self._dealt != self._own:
            self._left, self._since = self._lanes(order, *self._dealt).left(), self._consumed
            self._dealt = self._own
        self._taken.clear()
        self._records.clear()
        self._batches.now = self._read(order)

    def counted(self, loaded: Iterator[Any]) -> Iterator[Dealt]:
        workers, batch = self._own
        for one in loaded:
            part = self._taken.popleft()
            self._consumed += workers * batch
            yield one, part.mine, part.total

    def handed_out(self, before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
        reached = int(before["consumed"])
        for place in [place for place in self._records if place < reached]:
            del self._records[place]

    def records_after(self, position: Mapping[str, Any]) -> Sequence[Any] | None:
        records = self._records.get(int(position["consumed"]))
        found: list[int] | None = None if records is None else records.tolist()
        return found

    def shared(self, position: Mapping[str, Any]) -> dict[str, Any]:
        if self._order is None or not position["consumed"]:
            return {}
        # for a loader with deal="queue"
        return {"remaining": [list(one) for one in self._lanes(self._order, *self._dealt).left()]}

    def adapted(self, state: Mapping[str, Any]) -> Mapping[str, Any]:
        if "dealt" in state:
            return state
        if not state.get("consumed"):
            return {**state, "left": None, "since": 0, "dealt": list(self._own)}
        if state.get("hand") is None and "left" in state:
            # a queue has dealt out the rest
            since = int(state["consumed"])
            return {**state, "since": since, "dealt": list(self._own)}
        raise CheckpointError(
            "got a position that another kind of loader saved, expected one of a loader over "
            "groups of records; start a new epoch with loader.set_epoch"
        )

    def _lanes(self, order: WindowOrder, workers: int, batch: int) -> Lanes:
        """What is left of the epoch, dealt to so many workers."""
        left = [(0, len(order))] if self._left is None else self._left
        lanes = Lanes(order.cut(left), batch, workers, self._tail)
        lanes.skip((self._consumed - self._since) // (workers * batch))
        return lanes

    def _read(self, order: WindowOrder) -> Iterator[Ids]:
        """The records of each batch, as torch asks for them."""
        worker = self._shard.worker
        coming = self._windows(order)
        reads, place = -1, self._consumed
        for part in self._lanes(order, *self._own).parts(worker):
            for start, _ in part.intervals:
                number = order.window_at(start)
                if number != reads:
                    reads = number
                    self._announce(order, number, coming)
            records = [order.records(*one) for one in part.intervals]
            self._taken.append(part)
            self._records[place] = records[0] if len(records) == 1 else np.concatenate(records)
            yield self._records[place]
            place += self._shard.workers * self._batch

    def _windows(self, order: WindowOrder) -> Iterator[int]:
        """The windows that this worker reads, one after another."""
        for part in self._lanes(order, *self._own).parts(self._shard.worker):
            for start, _ in part.intervals:
                yield order.window_at(start)

    def _announce(self, order: WindowOrder, number: int, coming: Iterator[int]) -> None:
        """Let the data set load a window, and the one after it."""
        following = (one for one in coming if one != number)
        self._sampler.will_read(order, number, *itertools.islice(following, 1))
