# SPDX-License-Identifier: Apache-2.0
"""Loaders and data sets of other libraries: torchdata's StatefulDataLoader, map-style ones."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tests.data.simulated import Numbers, Workers, counting, plain
from torch.utils.data import BatchSampler, DataLoader, Sampler

from fleetlight.data import ShardLoader


class _Random(Sampler[int]):
    """What torchdata has in place of torch's sampler."""

    replacement = False

    def __init__(self, data_source: Numbers) -> None:
        self.data_source = data_source
        self.generator = torch.Generator()

    def __len__(self) -> int:
        return len(self.data_source)

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(len(self), generator=self.generator).tolist())


def of_torchdata(name: str, base: type) -> Any:
    return type(name, (base,), {"__module__": "torchdata.stateful_dataloader.sampler"})


def stateful() -> DataLoader[Any]:
    """A loader with the samplers of a StatefulDataLoader, which derives from DataLoader."""
    loader = plain(4)
    sampler = of_torchdata("RandomSampler", _Random)(Numbers(30))
    batches = of_torchdata("BatchSampler", BatchSampler)(sampler, 4, drop_last=False)
    # torch lets only the constructor set these
    vars(loader).update(sampler=sampler, batch_sampler=batches)
    return loader


def test_stateful_loader_has_the_order_of_a_plain_one() -> None:
    ours, usual = Workers(stateful, 3), Workers(lambda: plain(4, shuffle=True), 3)
    assert ours.epoch() == usual.epoch()
    first = ours.epoch(1)
    others = Workers(stateful, 2).load(ours.loaders[0].state_dict())
    assert sorted(counting(first) + counting(others.epoch())) == list(range(30))


class Rows:
    """A map-style data set that is not torch's."""

    def __len__(self) -> int:
        return 23

    def __getitem__(self, index: int) -> dict[str, int]:
        raise AssertionError("torch asks for whole batches")

    def __getitems__(self, indices: list[int]) -> list[dict[str, int]]:
        return [{"number": index} for index in indices]


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_dataset_of_dicts_is_sharded(workers: int) -> None:
    rows: Any = Rows()
    loader = DataLoader(rows, 4, shuffle=True)
    every = [
        ShardLoader(loader, worker=n, workers=workers, seed=0, tail="join") for n in range(workers)
    ]
    read = [n for one in every for batch in one for n in batch["number"][: one.counted].tolist()]
    assert sorted(read) == list(range(23))
