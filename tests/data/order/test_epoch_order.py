# SPDX-License-Identifier: Apache-2.0
"""The order of an epoch, from samplers of torch and of the user."""

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from fleetlight.data.order.epoch_order import epoch_seed, order_of

ten = range(10)


class Shuffled(Sampler[int]):
    """A permutation from the global generator of one library."""

    def __init__(self, library: str) -> None:
        self.library = library

    def __iter__(self) -> Iterator[Any]:
        if self.library == "torch":
            return iter(torch.randperm(10))
        if self.library == "numpy":
            return iter(np.random.permutation(10))
        return iter(random.sample(ten, 10))


class ByEpoch(Sampler[int]):
    """Starts at the epoch's number."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter([(i + self.epoch) % 10 for i in ten])


SAMPLERS: list[Any] = [
    RandomSampler(ten),
    RandomSampler(ten, generator=torch.Generator()),
    RandomSampler(ten, num_samples=25),
    RandomSampler(ten, num_samples=4),
    RandomSampler(ten, replacement=True),
    RandomSampler(ten, replacement=True, generator=torch.Generator()),
    SubsetRandomSampler([1, 3, 5, 7]),
    SubsetRandomSampler([1, 3, 5, 7], generator=torch.Generator()),
    WeightedRandomSampler([0.1] * 10, 10),
    Shuffled("torch"),
    Shuffled("numpy"),
    Shuffled("python"),
    BatchSampler(RandomSampler(ten, generator=torch.Generator()), 3, False),
    BatchSampler(Shuffled("numpy"), 3, False),
]


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_the_same_seed_and_epoch_give_the_same_order(sampler: Any) -> None:
    first = list(order_of(sampler, seed=3, epoch=2))
    assert list(order_of(sampler, seed=3, epoch=2)) == first
    others = [list(order_of(sampler, seed, epoch)) for seed, epoch in ((3, 3), (4, 2), (0, 0))]
    assert any(other != first for other in others)
    assert len(first) == len(list(sampler))


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_generators_of_the_script_are_unchanged(sampler: Any) -> None:
    own = getattr(sampler, "generator", None) or torch.default_generator
    before = own.get_state(), torch.get_rng_state(), random.getstate(), np.random.rand()
    np.random.seed(0)
    expected = np.random.rand()
    np.random.seed(0)
    order_of(sampler, 1, 1)
    assert torch.equal(own.get_state(), before[0])
    assert torch.equal(torch.get_rng_state(), before[1])
    assert random.getstate() == before[2]
    assert np.random.rand() == expected


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_orders_are_plain_numbers(sampler: Any) -> None:
    for entry in order_of(sampler, 0, 0):
        for index in entry if isinstance(entry, list) else [entry]:
            assert type(index) is int or isinstance(sampler, BatchSampler)


def test_a_sequential_sampler_gives_the_range() -> None:
    assert order_of(SequentialSampler(ten), 5, 5) == ten


def test_a_shuffle_is_a_permutation_and_differs_by_epoch() -> None:
    orders = [tuple(order_of(RandomSampler(ten), 0, epoch)) for epoch in range(5)]
    assert all(sorted(order) == list(ten) for order in orders)
    assert len(set(orders)) == 5


def test_set_epoch_is_called_if_a_sampler_has_it() -> None:
    assert order_of(ByEpoch(), seed=9, epoch=3)[0] == 3
    assert order_of(BatchSampler(ByEpoch(), 2, False), seed=9, epoch=4)[0] == [4, 5]


@pytest.mark.parametrize("seed", [0, 1, 2**31, 2**70])
def test_any_seed_is_valid_for_torch(seed: int) -> None:
    assert 0 <= epoch_seed(seed, 10) < 2**63
    assert sorted(order_of(RandomSampler(ten), seed, 10)) == list(ten)
    assert sorted(order_of(Shuffled("python"), seed, 10)) == list(ten)


def test_an_empty_sampler_gives_an_empty_order() -> None:
    assert len(order_of(SubsetRandomSampler([]), 0, 0)) == 0
    assert len(order_of(SequentialSampler([]), 0, 0)) == 0
