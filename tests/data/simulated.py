# SPDX-License-Identifier: Apache-2.0
"""Workers that share a loader, all in one process."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from tests.data.observing import Observing
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, get_worker_info

from fleetlight.data import ShardLoader

Make = Callable[[], DataLoader[Any]]


class Numbers(Dataset[int]):
    """Record i has the value i."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return index


class Stream(IterableDataset[int]):
    """0, 1, 2 ...; with `split`, each loading process yields its own part."""

    def __init__(self, length: int, split: bool = False) -> None:
        self.length = length
        self.split = split
        self.epochs: list[int] = []

    def __len__(self) -> int:
        return self.length

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info() if self.split else None
        return iter(range(self.length) if info is None else self.part(info.id))

    def part(self, process: int) -> range:
        """The first third belongs to process 0, the rest to process 1."""
        cut = self.length // 3
        return range(cut) if process == 0 else range(cut, self.length)


class Ragged(Sampler[list[int]]):
    """Batches of 1, 2, 3, 1, 2, 3 ... records."""

    def __len__(self) -> int:
        return 7

    def __iter__(self) -> Iterator[list[int]]:
        start = 0
        for i in range(7):
            yield list(range(start, start + 1 + i % 3))
            start += 1 + i % 3


@dataclasses.dataclass
class Step:
    """The batch of one worker in one step, and its counts."""

    records: list[int]
    mine: int
    total: int


class Workers:
    """`number` workers, each of which shards its own loader."""

    def __init__(
        self, make: Make, number: int, *, tail: str = "join", seed: int = 0, announce: Any = None
    ) -> None:
        self.shares: list[list[Any]] = [[] for _ in range(number)]
        self.loaders = [
            ShardLoader(
                make(),
                worker=worker,
                workers=number,
                seed=seed,
                tail=tail,
                observer=Observing(self.shares[worker].append, announce),
            )
            for worker in range(number)
        ]

    def epoch(self, steps: int | None = None) -> list[list[Step]]:
        """One epoch (or the next `steps`) in lockstep; returns the steps of all workers."""
        rounds: list[list[Step]] = []
        iterators = [iter(loader) for loader in self.loaders]
        for _ in range(steps) if steps is not None else itertools.count():
            batches = [next(iterator, None) for iterator in iterators]
            if all(batch is None for batch in batches):
                break
            assert all(batch is not None for batch in batches), "one worker has fewer steps"
            rounds.append([self._step(i, batch) for i, batch in enumerate(batches)])
        return rounds

    def load(self, state: dict[str, Any]) -> Workers:
        """Moves all workers to one position."""
        for loader in self.loaders:
            loader.load_state_dict(state)
        return self

    def _step(self, worker: int, batch: Any) -> Step:
        mine, total, *_ = self.shares[worker][-1]
        assert self.loaders[worker].counted == mine
        return Step(numbers_in(batch), mine, total)


class Announced:
    """Records the announced batches."""

    def __init__(self) -> None:
        self.batches: list[list[Any]] = []
        self.active = True

    def batches_ahead(self) -> int:
        return int(self.active)

    def __call__(self, batches: Sequence[Any]) -> None:
        self.batches.append([numbers_in(batch) for batch in batches])


def numbers_in(batch: Any) -> list[int]:
    """The records of a batch, with or without collation."""
    return batch.tolist() if isinstance(batch, Tensor) else list(batch)


def counting(rounds: list[list[Step]]) -> list[int]:
    """All counted records, in order of steps and workers."""
    return [record for row in rounds for step in row for record in step.records[: step.mine]]


#: with persistent loading processes, without them, with new ones in each epoch
PROCESSES: list[dict[str, Any]] = [
    {"num_workers": 2, "persistent_workers": True},
    {},
    {"num_workers": 2},
]


def in_processes(test: Any) -> Any:
    """Run a test with each of these loading processes, in `make test` with the first two."""
    each = pytest.mark.parametrize("processes", PROCESSES, ids=["2 persistent", "0", "2"])
    return pytest.mark.sampled(2)(each(test))


def records(step: list[Step]) -> list[int]:
    """The counted records of one step, over all workers."""
    return [record for part in step for record in part.records[: part.mine]]


def plain(size: int = 4, length: int = 30, **settings: Any) -> DataLoader[Any]:
    """A loader over numbers."""
    return DataLoader(Numbers(length), batch_size=size, **settings)


def single(loader: DataLoader[Any], **settings: Any) -> ShardLoader:
    """The shard of a single worker."""
    named: dict[str, Any] = {"worker": 0, "workers": 1, "seed": 0, "tail": "join"}
    parts = ("announce", "between", "follow")
    shares = {name: settings.pop(name) for name in parts if name in settings}
    return ShardLoader(loader, **{**named, **settings}, observer=Observing(**shares))
