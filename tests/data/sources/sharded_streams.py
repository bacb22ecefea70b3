# SPDX-License-Identifier: Apache-2.0
"""Streams in shards, with the methods of HuggingFace's, and workers that read them in threads."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from fleetlight.data import ShardLoader


class ShardedNumbers(IterableDataset[int]):
    """Numbers in shards of these sizes; says how many of its records were read."""

    def __init__(self, shards: Sequence[range]) -> None:
        self.shards = list(shards)
        self._read, self._skipped, self.epoch = 0, 0, 0

    @classmethod
    def of(cls, sizes: Sequence[int]) -> ShardedNumbers:
        starts = [sum(sizes[:n]) for n in range(len(sizes))]
        return cls([range(start, start + size) for start, size in zip(starts, sizes, strict=True)])

    @property
    def num_shards(self) -> int:
        return len(self.shards)

    def shard(self, num_shards: int, index: int) -> ShardedNumbers:
        return type(self)(self.shards[index::num_shards])

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def state_dict(self) -> dict[str, Any]:
        return {"read": self._read, "epoch": self.epoch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["epoch"] == self.epoch
        self._skipped = state["read"]

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        own = self.shards if info is None else self.shards[info.id :: info.num_workers]
        if self.epoch % 2:
            own = own[::-1]
        numbers = [number for shard in own for number in shard]
        self._read = self._skipped
        for number in numbers[self._skipped :]:
            self._read += 1
            yield number


class Unsaying(ShardedNumbers):
    """The same without a position."""

    state_dict = load_state_dict = None  # type: ignore[assignment]


class Meeting:
    """Workers in threads tell each other their counts."""

    def __init__(self, workers: int) -> None:
        self._barrier, self._counts = threading.Barrier(workers, timeout=20), [[0]] * workers
        self.calls = 0

    def agree(self, worker: int) -> Callable[[Sequence[int]], list[list[int]]]:
        def agreed(counts: Sequence[int]) -> list[list[int]]:
            self._counts[worker] = list(counts)
            self._barrier.wait()
            found = list(self._counts)
            self.calls += self._barrier.wait() == 0
            return found

        return agreed


def split(make: Callable[[], DataLoader[Any]], workers: int, **more: Any) -> list[ShardLoader[Any]]:
    """The loaders of all workers with deal="shards"."""
    meeting = Meeting(workers)
    usual: dict[str, Any] = {"seed": 0, "tail": "join", **more}
    return [
        ShardLoader(make(), worker=n, workers=workers, agree=meeting.agree(n), **usual)
        for n in range(workers)
    ]


def read(loaders: Sequence[ShardLoader[Any]], steps: int | None = None) -> list[list[list[int]]]:
    """By worker: the records of its next batches that count."""

    def one(loader: ShardLoader[Any]) -> list[list[int]]:
        found = []
        for step, batch in enumerate(loader, start=1):
            found.append(batch[: loader.counted].tolist())
            if step == steps:
                break
        return found

    with ThreadPoolExecutor(len(loaders)) as pool:
        return list(pool.map(one, loaders))


def counted(batches: Sequence[Sequence[Sequence[int]]]) -> Counter[int]:
    return Counter(number for one in batches for batch in one for number in batch)
