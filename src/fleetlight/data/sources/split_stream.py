# SPDX-License-Identifier: Apache-2.0
"""`SplitSource`: a stream in shards, of which each worker reads its own.

Shards differ in length, so before every few steps the workers tell each other how many records they
have for these. A worker that has none left repeats one that does not count, until all have ended.
"""

from __future__ import annotations

import collections
import copy
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from fleetlight.data.order.epoch_order import epoch_seed
from fleetlight.data.order.seeded_rng import SeededRng
from fleetlight.data.sources.source import Dealt, RecordSource, Shard
from fleetlight.errors import CheckpointError, ConfigError, DataError

#: given how many samples the next batches of this worker have, those of each worker; None where
#: workers do not make their steps together
Agree = Callable[[Sequence[int]], Sequence[Sequence[int]] | None]

#: batches that are loaded before the workers agree on them
_AHEAD = 8


class SplitBatch(NamedTuple):
    """A batch from a loading process."""

    batch: Any
    #: its samples; 0: no batch, the process skips its turn
    samples: int
    process: int
    #: where the data set is after it; None where it does not say
    state: Any


class _Start(NamedTuple):
    """Where an iteration starts, by loading process."""

    epoch: int
    seed: int
    turn: int
    taken: Sequence[int]
    states: Sequence[Any]


class SplitStream(IterableDataset[SplitBatch]):
    """Batches of a worker's own shards, which the data set divides among loading processes."""

    def __init__(self, loader: DataLoader[Any], shard: Shard, *, drops: bool) -> None:
        self._dataset: Any = loader.dataset
        self._shard, self._drops = shard, drops
        self._batch, self.collate = loader.batch_size or 1, loader.collate_fn
        self.start = _Start(0, 0, 0, [0], [None])

    def __iter__(self) -> Iterator[SplitBatch]:
        info = get_worker_info()
        process = 0 if info is None else info.id
        start = self.start
        if process < start.turn:
            # torch starts with process 0, whose turn was before the position
            yield SplitBatch(None, 0, process, None)
        chance = SeededRng((start.seed + process) % 2**63)
        with chance:
            part = self.part(start.epoch)
            records = _opened(part, start.states[process], start.taken[process])
        while True:
            with chance:
                block = list(itertools.islice(records, self._batch))
                if not block or (len(block) < self._batch and self._drops):
                    return
                batch = self.collate(block)
            yield SplitBatch(batch, len(block), process, _state_of(part))

    def part(self, epoch: int) -> Any:
        """The worker's own shards in an epoch, from their beginning."""
        part = self._dataset.shard(num_shards=self._shard.workers, index=self._shard.worker)
        if hasattr(part, "set_epoch"):
            part.set_epoch(epoch)
        return part


def _opened(part: Any, state: Any, taken: int) -> Iterator[Any]:
    """The records after a state, or where there is none after those taken."""
    if state is None:
        return itertools.islice(part, taken, None)
    part.load_state_dict(state)
    return iter(part)


def _state_of(part: Any) -> Any:
    says = getattr(part, "state_dict", None)
    return None if says is None else copy.deepcopy(says())


class SplitSource(RecordSource):
    """The position is where each loading process of this worker is in its shards.

    It holds for this worker, and for as many workers as saved it.
    """

    knows_its_end = False
    may_resume_at_end = True

    def __init__(self, loader: DataLoader[Any], shard: Shard, agree: Agree) -> None:
        _refuse(loader, shard)
        self._shard, self._agree = shard, agree
        self._drops = loader.drop_last or shard.tail == "drop"
        self._shards: int = loader.dataset.num_shards  # type: ignore[attr-defined]
        self._processes = max(1, loader.num_workers)
        self._stream = SplitStream(loader, shard, drops=self._drops)
        self._epoch = 0
        self.position = {}

    def arguments(self) -> dict[str, Any]:
        # a process learns where to start when it begins
        once = {"persistent_workers": False}
        return {"dataset": self._stream, "batch_size": None, "collate_fn": _as_it_is, **once}

    def steps(self) -> int:
        raise TypeError(
            "a loader with deal='shards' has no length: how many records the shards have is known "
            "when they have been read"
        )

    def settings(self) -> dict[str, object]:
        return {
            "deal": "shards",
            "shards": self._shards,
            "num_workers": self._processes,
            "drop_last": self._drops,
        }

    @property
    def position(self) -> dict[str, Any]:
        return {
            "consumed": self._consumed,
            "streams": list(self._taken),
            "states": list(self._states),
            "turn": self._turn,
            "agreed": list(self._agreed),
            "of": [self._shard.worker, self._shard.workers],
        }

    @position.setter
    def position(self, position: Mapping[str, Any]) -> None:
        worker, workers = position.get("of", (self._shard.worker, self._shard.workers))
        taken = [int(one) for one in position.get("streams", [0] * self._processes)]
        if position.get("consumed") or position.get("agreed"):
            self._check(int(worker), int(workers), len(taken))
        else:
            taken = [0] * self._processes
        self._consumed = int(position.get("consumed", 0))
        self._taken = taken
        self._states = list(position.get("states", ())) or [None] * self._processes
        self._turn = int(position.get("turn", 0))
        #: samples of all workers in the next steps; 0 after the last one
        self._agreed = [int(one) for one in position.get("agreed", ())]
        #: those of all steps whose batches have not been handed out
        self._open = list(self._agreed)

    def _check(self, worker: int, workers: int, processes: int) -> None:
        own = self._shard
        epoch = "or start the next epoch with loader.set_epoch"
        if workers != own.workers:
            raise CheckpointError(
                f"got a position of {workers} workers, each in shards of its own, but here are "
                f"{own.workers}; resume with {workers} workers, {epoch}"
            )
        if worker != own.worker:
            raise CheckpointError(
                f"got the position of worker {worker} in its shards, but this is worker "
                f"{own.worker}; load a checkpoint of the job, {epoch}"
            )
        if processes != self._processes:
            raise CheckpointError(
                f"got a position of {processes} loading processes, but the loader has "
                f"{self._processes}; make the DataLoader with num_workers={processes}, {epoch}"
            )

    def adapted(self, state: Mapping[str, Any]) -> Mapping[str, Any]:
        if "of" not in state:
            if not state.get("consumed"):
                return {**self.position, "epoch": 0, "seed": 0, **state}
            raise CheckpointError(
                "got a position that was saved without deal='shards', within an epoch; leave deal "
                "as it was, or start the next epoch with loader.set_epoch"
            )
        own = self._shard.worker
        each: Sequence[Mapping[str, Any] | None] = state.get("each", ())
        if not each or int(state["of"][1]) != self._shard.workers:
            return state
        mine = each[own] if own < len(each) else None
        if mine is not None:
            return mine
        # worker 0 has saved alone: this one had read about as much
        return {**state, "of": [own, self._shard.workers], "states": [], "agreed": []}

    def is_at_end(self, position: Mapping[str, Any]) -> bool:
        return bool(position["agreed"] == [0])

    def begin(self, epoch: int, seed: int) -> None:
        self._epoch = epoch
        chance = epoch_seed(seed, epoch) + self._shard.worker * self._processes
        self._stream.start = _Start(epoch, chance, self._turn, self._taken, self._states)

    def counted(self, loaded: Iterator[SplitBatch]) -> Iterator[Dealt]:
        batches = (one for one in loaded if one.samples)
        ahead: collections.deque[SplitBatch] = collections.deque()
        while True:
            if not self._agreed:
                self._agreed = self._agree_on(batches, ahead)
                self._open += self._agreed
            total = self._agreed.pop(0)
            if not total:
                self._agreed = [0]
                return
            one = ahead.popleft() if ahead else next(batches, None)
            self._consumed += total
            if one is None:
                yield self._filler(), 0, total
                continue
            self._taken[one.process] += one.samples
            self._states[one.process] = one.state
            self._turn = (one.process + 1) % self._processes
            yield one.batch, one.samples, total

    def before(self, position: dict[str, Any], after: dict[str, Any], total: int) -> dict[str, Any]:
        # a batch that was loaded early may have been the last of those agreed on then
        agreed, self._open = self._open, self._open[1:]
        return {**position, "agreed": agreed}

    def _agree_on(
        self, batches: Iterator[SplitBatch], ahead: collections.deque[SplitBatch]
    ) -> list[int]:
        """The samples of all workers in each of the next steps; 0 after the last one."""
        steps = 1 if self._shard.workers == 1 else _AHEAD
        ahead.extend(itertools.islice(batches, steps - len(ahead)))
        own = [one.samples for one in ahead] + [0] * (steps - len(ahead))
        each = self._agree(own)
        if each is None:
            totals = [samples * self._shard.workers for samples in own]
        else:
            # with "drop" the epoch ends with the first worker
            ends = all if self._shard.tail == "drop" else any
            totals = [sum(step) if ends(step) else 0 for step in zip(*each, strict=True)]
        return totals[: totals.index(0) + 1] if 0 in totals else totals

    def _filler(self) -> Any:
        """A batch of one record, which does not count."""
        for record in self._stream.part(self._epoch):
            return self._stream.collate([record])
        raise DataError(
            f"worker {self._shard.worker} got no record in its part of {self._shards} shards, but "
            "all workers need one to take part in steps; write the data into shards of similar "
            "size"
        )


def _refuse(loader: DataLoader[Any], shard: Shard) -> None:
    dataset: Any = loader.dataset
    name = type(dataset).__name__
    if not isinstance(dataset, IterableDataset):
        raise ConfigError(
            "fleet.shard: got deal='shards' and records by number; leave deal out, each worker "
            "reads its own records then, and any number of workers can resume"
        )
    if not hasattr(dataset, "num_shards") or not callable(getattr(dataset, "shard", None)):
        raise ConfigError(
            f"fleet.shard: got deal='shards', but {name} is not in shards: it needs num_shards and "
            "shard(num_shards=..., index=...), as a stream of HuggingFace's datasets has; leave "
            "deal out, each worker keeps its part of the whole stream then"
        )
    if dataset.num_shards < shard.workers:
        raise ConfigError(
            f"fleet.shard: got deal='shards' and {dataset.num_shards} shards for {shard.workers} "
            "workers; write the data into more files, or leave deal out"
        )
    if loader.batch_size is None or shard.tail == "pad":
        got = "batch_size=None" if loader.batch_size is None else "tail='pad'"
        raise ConfigError(
            f"fleet.shard: got deal='shards' and {got}, expected a batch_size, and tail='join' or "
            "'drop'"
        )


def _as_it_is(batch: Any) -> Any:
    return batch
