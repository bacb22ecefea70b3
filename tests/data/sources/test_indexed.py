# SPDX-License-Identifier: Apache-2.0
"""Which worker gets which records: by index, by ready batches, from streams."""

import logging
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from tests.data.simulated import (
    Numbers,
    Ragged,
    Stream,
    Workers,
    counting,
    in_processes,
    plain,
    records,
    single,
)
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

pytestmark = pytest.mark.slow

# --- records by index


@in_processes
@pytest.mark.parametrize("number", [3, 2, 1])
def test_a_sequential_loader_keeps_its_order(number: int, processes: dict[str, Any]) -> None:
    workers = Workers(lambda: plain(**processes), number)
    for _ in range(2):
        rounds = workers.epoch()
        assert counting(rounds) == list(range(30))
        assert len(rounds) == len(workers.loaders[0]) == -(-30 // (4 * number))


@in_processes
def test_shuffled_step_i_is_batch_i_of_one_process(processes: dict[str, Any]) -> None:
    alone = Workers(lambda: plain(12, shuffle=True), 1, seed=5)
    three = Workers(lambda: plain(4, shuffle=True, **processes), 3, seed=5)
    for _ in range(2):
        assert [records(s) for s in three.epoch()] == [records(s) for s in alone.epoch()]


def test_epochs_differ_and_repeat_by_seed() -> None:
    def epochs(seed: int) -> list[list[int]]:
        workers = Workers(lambda: plain(shuffle=True), 2, seed=seed)
        return [counting(workers.epoch()) for _ in range(3)]

    assert epochs(0) == epochs(0) != epochs(1)
    assert all(sorted(epoch) == list(range(30)) for epoch in epochs(0))
    assert len({tuple(epoch) for epoch in epochs(0)}) == 3


def test_generators_of_torch_do_not_affect_the_order() -> None:
    orders = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        generator = torch.Generator().manual_seed(seed)
        workers = Workers(lambda g=generator: plain(shuffle=True, generator=g), 2)  # type: ignore[misc]
        orders.append(counting(workers.epoch()))
    assert orders[0] == orders[1]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("tail", ["pad", "join", "drop"])
def test_each_tail_handles_the_short_block(tail: str) -> None:
    workers = Workers(lambda: plain(), 2, tail=tail)
    rounds = workers.epoch()
    seen = counting(rounds)
    assert (
        seen == {"join": list(range(30)), "drop": list(range(24)), "pad": [*range(30), 0, 1]}[tail]
    )
    assert len(rounds) == len(workers.loaders[0]) == (3 if tail == "drop" else 4)
    last = rounds[-1]
    assert [(s.mine, s.total) for s in last] == [(3, 6)] * 2 if tail == "join" else [(4, 8)] * 2


def test_drop_last_selects_the_drop_tail() -> None:
    workers = Workers(lambda: plain(drop_last=True), 2)
    assert counting(workers.epoch()) == list(range(24))
    assert len(workers.loaders[0]) == 3


def test_a_worker_without_records_gets_a_filler() -> None:
    (step,) = Workers(lambda: plain(length=2), 4).epoch()
    assert [(s.records, s.mine, s.total) for s in step] == [
        ([0], 1, 2),
        ([1], 1, 2),
        ([0], 0, 2),
        ([0], 0, 2),
    ]


def test_an_empty_data_set_has_no_steps() -> None:
    for settings in ({}, {"sampler": SubsetRandomSampler([])}):
        workers = Workers(lambda s=settings: plain(length=0, **s), 2)  # type: ignore[misc]
        assert workers.epoch() == []
        assert len(workers.loaders[0]) == 0


def test_the_share_is_reset_after_the_last_batch() -> None:
    workers = Workers(lambda: plain(length=5), 2)
    workers.epoch()
    last = [[share and share[:2] for share in shares[-2:]] for shares in workers.shares]
    assert last == [[(3, 5), None], [(2, 5), None]]


@in_processes
def test_weighted_and_replacement_samplers_are_sharded(processes: dict[str, Any]) -> None:
    def weighted() -> DataLoader[Any]:
        return plain(sampler=WeightedRandomSampler([0.0, 1.0, 2.0] * 10, 26), **processes)

    def replaced() -> DataLoader[Any]:
        return plain(sampler=RandomSampler(range(30), replacement=True), **processes)

    for make, length in ((weighted, 26), (replaced, 30)):
        alone = Workers(lambda make=make: plain(8, sampler=make().sampler), 1)  # type: ignore[misc]
        seen = [records(step) for step in Workers(make, 2).epoch()]
        assert seen == [records(step) for step in alone.epoch()]
        assert sum(map(len, seen)) == length
    assert all(record % 3 for record in counting(Workers(weighted, 2).epoch()))


def test_a_subset_sampler_is_sharded() -> None:
    odd = list(range(1, 30, 2))
    workers = Workers(lambda: plain(sampler=SubsetRandomSampler(odd)), 3)
    assert sorted(counting(workers.epoch())) == odd


class Reversed(Sampler[int]):
    """A user's sampler with its own set_epoch."""

    def __init__(self) -> None:
        self.epochs: list[int] = []

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)

    def __len__(self) -> int:
        return 10

    def __iter__(self) -> Iterator[int]:
        return iter(range(9, -1, -1))


def test_a_custom_sampler_is_sharded() -> None:
    sampler = Reversed()
    workers = Workers(lambda: plain(sampler=sampler), 2)
    assert counting(workers.epoch()) == list(range(9, -1, -1))
    workers.epoch()
    assert set(sampler.epochs) == {0, 1}


class Unrepeatable(Sampler[int]):
    """Draws from a generator that the loader cannot seed."""

    def __init__(self) -> None:
        self._rng = np.random.default_rng()

    def __iter__(self) -> Iterator[int]:
        return iter(self._rng.permutation(30).tolist())


def test_a_sampler_that_differs_between_workers_is_warned_about(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("fleetlight"), "propagate", True)
    next(iter(Workers(lambda: plain(sampler=Unrepeatable()), 1).loaders[0]))
    Workers(lambda: plain(sampler=SubsetRandomSampler([1, 2])), 2).epoch()
    assert caplog.text == ""
    loader = Workers(lambda: plain(sampler=Unrepeatable()), 2).loaders[0]
    for _ in range(2):
        next(iter(loader))
    assert caplog.text.count("Unrepeatable gives a different order each time") == 1
    assert "two workers may read the same records" in caplog.text


# --- ready batches by index


@in_processes
def test_batches_of_a_batch_sampler_stay_whole(processes: dict[str, Any]) -> None:
    def make() -> DataLoader[Any]:
        return DataLoader(Numbers(30), batch_sampler=Ragged(), **processes)

    workers = Workers(make, 2)
    rounds = workers.epoch()
    assert [records(step) for step in rounds] == [[0, 1, 2], [3, 4, 5, 6], [7, 8, 9, 10, 11], [12]]
    assert [(s.mine, s.total) for s in rounds[0]] == [(1, 3), (2, 3)]
    assert [(s.mine, s.total) for s in rounds[-1]] == [(1, 1), (0, 1)]
    assert len(workers.loaders[0]) == 4
    assert workers.loaders[0].samples_per_step is None


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("tail", "batches"), [("pad", 8), ("drop", 6)])
def test_each_tail_handles_ready_batches(tail: str, batches: int) -> None:
    workers = Workers(lambda: DataLoader(Numbers(30), batch_sampler=Ragged()), 2, tail=tail)
    rounds = workers.epoch()
    assert len(rounds) == len(workers.loaders[0]) == batches // 2
    assert sum(bool(step.mine) for row in rounds for step in row) == batches
    if tail == "pad":
        assert [s.records for s in rounds[-1]] == [[12], [0]]


def test_a_shuffled_batch_sampler_is_equal_on_all_workers() -> None:
    def make() -> DataLoader[Any]:
        sampler = RandomSampler(range(30), generator=torch.Generator().manual_seed(1))
        return DataLoader(Numbers(30), batch_sampler=BatchSampler(sampler, 4, False))

    workers = Workers(make, 3)
    epochs = [counting(workers.epoch()) for _ in range(2)]
    assert all(sorted(epoch) == list(range(30)) for epoch in epochs)
    assert epochs[0] != epochs[1]


# --- streams


@in_processes
def test_a_stream_is_sharded(processes: dict[str, Any]) -> None:
    def make() -> DataLoader[Any]:
        # one loading process: others would repeat every record, as in plain torch
        only = {**processes, "num_workers": 1} if processes else {}
        return DataLoader(Stream(30), batch_size=4, **only)

    workers = Workers(make, 2)
    for _ in range(2):
        rounds = workers.epoch()
        assert counting(rounds) == list(range(30))
        assert len(rounds) == len(workers.loaders[0]) == 4


@in_processes
@pytest.mark.parametrize("tail", ["join", "drop"])
def test_a_stream_may_split_itself_by_loading_process(tail: str, processes: dict[str, Any]) -> None:
    workers = Workers(
        lambda: DataLoader(Stream(60, split=True), batch_size=4, **processes), 2, tail=tail
    )
    for _ in range(2):
        seen = counting(workers.epoch())
        assert len(seen) == len(set(seen))
        if tail == "join":
            assert sorted(seen) == list(range(60))
        else:
            assert len(seen) == (16 + 40 if processes else 56)


def test_drop_last_drops_the_short_block_of_a_stream() -> None:
    workers = Workers(lambda: DataLoader(Stream(30), batch_size=4, drop_last=True), 2)
    assert counting(workers.epoch()) == list(range(24))


class WithoutLength(Stream):
    __len__ = None  # type: ignore[assignment]


def test_a_stream_without_length_has_no_sharded_length() -> None:
    loader = single(DataLoader(WithoutLength(5), batch_size=2))
    with pytest.raises(TypeError):
        len(loader)
    assert sum(len(batch) for batch in loader) == 5


class Epochs(Stream):
    """Each record is the number of the epoch."""

    epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter([self.epoch] * 4)


@in_processes
def test_loading_processes_set_the_epoch_of_a_stream(processes: dict[str, Any]) -> None:
    workers = Workers(lambda: DataLoader(Epochs(4), batch_size=2, **processes), 2)
    for epoch in range(3):
        assert set(counting(workers.epoch())) == {epoch}


def test_settings_list_what_must_be_equal_on_all_workers() -> None:
    own = {"batch_size": 4, "seed": 0, "tail": "join"}
    of_records = {"records": 30, "sampler": "SequentialSampler", "drop_last": True}
    assert single(plain(drop_last=True)).settings() == own | of_records
    assert single(DataLoader(Numbers(30), batch_sampler=Ragged())).settings()["sampler"] == "Ragged"
    stream = single(DataLoader(Stream(30), batch_size=4)).settings()
    assert stream == own | {"records": 30, "num_workers": 1, "drop_last": False}
