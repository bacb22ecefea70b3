# SPDX-License-Identifier: Apache-2.0
"""The order of an epoch, from samplers of torch and of the user."""

import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from fleetlight.data.order.blocks import BlockPart, Blocks, Interval, padded
from fleetlight.data.order.epoch_order import epoch_seed, order_of
from fleetlight.data.order.lanes import LanePart, Lanes
from fleetlight.data.order.seeded_rng import SeededRng
from fleetlight.data.order.window_order import WindowOrder
from fleetlight.errors import ConfigError

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


# -- which worker gets which record: properties over all sizes ------------------------------------

lengths, sizes, counts = st.integers(0, 200), st.integers(1, 9), st.integers(1, 9)


def positions(part: BlockPart) -> list[int]:
    return list(range(part.start, part.start + part.mine))


@settings(deadline=None)
@given(lengths, sizes, counts)
def test_joined_parts_lose_and_repeat_nothing(length: int, batch: int, n: int) -> None:
    blocks = Blocks(length, batch, n, "join")
    seen = [p for w in range(n) for part in blocks.parts(w) for p in positions(part)]
    assert sorted(seen) == list(range(length))


@settings(deadline=None)
@given(lengths, sizes, counts)
def test_joined_fillers_are_one_uncounted_record(length: int, batch: int, n: int) -> None:
    blocks = Blocks(length, batch, n, "join")
    for worker in range(n):
        for part in blocks.parts(worker):
            assert 0 <= part.start < part.stop <= length
            assert part.stop - part.start == max(1, part.mine)
            assert part.mine <= batch


@settings(deadline=None)
@given(lengths, sizes, counts)
def test_a_joined_block_is_shared_evenly(length: int, batch: int, n: int) -> None:
    blocks = Blocks(length, batch, n, "join")
    for step in zip(*(blocks.parts(w) for w in range(n)), strict=True):
        mine = [part.mine for part in step]
        assert {part.total for part in step} == {sum(mine)}
        assert max(mine) - min(mine) <= 1


@settings(deadline=None)
@given(lengths, sizes, counts)
def test_dropping_omits_the_short_block_only(length: int, batch: int, n: int) -> None:
    blocks = Blocks(length, batch, n, "drop")
    parts = [part for w in range(n) for part in blocks.parts(w)]
    seen = sorted(p for part in parts for p in positions(part))
    assert seen == list(range(length - length % (batch * n)))
    assert all(part.mine == batch and part.total == batch * n for part in parts)


@settings(deadline=None)
@given(lengths, sizes, counts)
def test_padding_repeats_the_first_records(length: int, batch: int, n: int) -> None:
    blocks = Blocks(length, batch, n, "pad")
    order = list(range(length))
    rounds = zip(*(blocks.parts(w) for w in range(n)), strict=True)
    seen = [r for step in rounds for part in step for r in padded(order, part)]
    assert len(seen) == -(-length // (batch * n)) * batch * n
    assert seen == [i % length for i in range(len(seen))]
    assert all(p.mine == batch and p.total == batch * n for w in range(n) for p in blocks.parts(w))


@settings(deadline=None)
@given(lengths, sizes, counts, st.sampled_from(["join", "drop", "pad"]), st.integers(0, 200))
def test_all_workers_make_the_same_steps(
    length: int, batch: int, n: int, tail: str, consumed: int
) -> None:
    blocks = Blocks(length, batch, n, tail)
    assert {len(list(blocks.parts(w, consumed))) for w in range(n)} == {blocks.steps(consumed)}


@settings(deadline=None)
@given(lengths, sizes, counts, st.sampled_from(["join", "pad"]))
def test_step_i_is_batch_i_of_one_process(length: int, batch: int, n: int, tail: str) -> None:
    many, one = Blocks(length, batch, n, tail), Blocks(length, batch * n, 1, tail)
    for step, whole in zip(
        zip(*(many.parts(w) for w in range(n)), strict=True), one.parts(0), strict=True
    ):
        together = [p for part in step for p in positions(part)]
        assert together == positions(whole)


@settings(deadline=None)
@given(st.data(), lengths, sizes, counts, sizes, counts)
def test_resuming_with_other_workers_loses_and_repeats_nothing(
    data: st.DataObject, length: int, batch: int, n: int, new_batch: int, m: int
) -> None:
    before, after = Blocks(length, batch, n), Blocks(length, new_batch, m)
    done = data.draw(st.integers(0, before.steps()))
    first = [p for w in range(n) for part in list(before.parts(w))[:done] for p in positions(part)]
    rest = [p for w in range(m) for part in after.parts(w, done * before.block)
            for p in positions(part)]  # fmt: skip
    assert sorted(first + rest) == list(range(length))


@settings(deadline=None)
@given(lengths, sizes, counts, st.sampled_from(["join", "drop", "pad"]))
def test_resuming_with_the_same_workers_is_exact(
    length: int, batch: int, n: int, tail: str
) -> None:
    blocks = Blocks(length, batch, n, tail)
    for worker in range(n):
        parts = list(blocks.parts(worker))
        for done in range(len(parts) + 1):
            assert list(blocks.parts(worker, done * blocks.block)) == parts[done:]


def test_a_short_block_is_split_evenly() -> None:
    blocks = Blocks(length=5, batch=2, workers=3)
    assert [blocks.part(0, w) for w in range(3)] == [
        BlockPart(0, 2, 2, 5),
        BlockPart(2, 4, 2, 5),
        BlockPart(4, 5, 1, 5),
    ]
    assert Blocks(length=1, batch=2, workers=2).part(0, 1) == BlockPart(0, 1, 0, 1)


def test_an_unknown_tail_is_refused() -> None:
    with pytest.raises(ConfigError, match="tail='cut', expected one of join, drop, pad"):
        Blocks(1, 1, 1, "cut")


# -- `Lanes`: every record once, in equal steps, and what is left after any step ------------------

some_lengths = st.lists(st.integers(1, 40), min_size=1, max_size=12)
workers = st.sampled_from([1, 2, 3, 5])
batches = st.integers(1, 9)


def pieces_of(some_lengths: Sequence[int]) -> list[Interval]:
    return [(sum(some_lengths[:n]), sum(some_lengths[: n + 1])) for n in range(len(some_lengths))]


def parts_of(
    pieces: Sequence[Interval], batch: int, count: int, tail: str = "join", skip: int = 0
) -> list[list[LanePart]]:
    """The parts of each worker."""
    found = []
    for worker in range(count):
        lanes = Lanes(pieces, batch, count, tail)
        lanes.skip(skip)
        found.append(list(lanes.parts(worker)))
    return found


def records(parts: Sequence[LanePart]) -> Counter[int]:
    return Counter(
        place for part in parts if part.mine for one in part.intervals for place in range(*one)
    )


@given(some_lengths, batches, workers)
def test_every_record_counts_once(sizes: list[int], batch: int, count: int) -> None:
    every = parts_of(pieces_of(sizes), batch, count)
    assert sum((records(parts) for parts in every), Counter()) == Counter(range(sum(sizes)))
    assert {len(parts) for parts in every} == {Blocks(sum(sizes), batch, count).steps()}
    for step in zip(*every, strict=True):
        assert {part.total for part in step} == {sum(part.mine for part in step)}


@given(some_lengths, batches, workers, st.sampled_from(["drop", "pad"]))
def test_other_tails_have_as_many_steps_as_blocks(
    sizes: list[int], batch: int, count: int, tail: str
) -> None:
    every = parts_of(pieces_of(sizes), batch, count, tail)
    assert {len(parts) for parts in every} == {Blocks(sum(sizes), batch, count, tail).steps()}
    for part in (part for parts in every for part in parts):
        assert sum(high - low for low, high in part.intervals) == part.mine == batch
    least = 1 if tail == "pad" else 0
    read = sum((records(parts) for parts in every), Counter())
    assert all(least <= read[place] for place in range(sum(sizes)))
    assert tail == "pad" or max(read.values(), default=1) == 1


@given(some_lengths, batches, workers, st.lists(st.tuples(batches, workers, st.integers(0, 9))))
def test_other_workers_share_what_is_left(
    sizes: list[int], batch: int, count: int, stops: list[tuple[int, int, int]]
) -> None:
    left, read = pieces_of(sizes), Counter[int]()
    for size, number, steps in [*stops, (batch, count, sum(sizes))]:
        for parts in parts_of(left, size, number):
            read += records(parts[:steps])
        lanes = Lanes(left, size, number, "join")
        lanes.skip(steps)
        left = lanes.left()
    assert read == Counter(range(sum(sizes)))
    assert left == []


@given(some_lengths, batches, workers, st.integers(0, 9))
def test_same_workers_continue_as_if_they_had_not_stopped(
    sizes: list[int], batch: int, count: int, steps: int
) -> None:
    whole = parts_of(pieces_of(sizes), batch, count)
    rest = parts_of(pieces_of(sizes), batch, count, skip=steps)
    assert [parts[steps:] for parts in whole] == rest


@given(some_lengths, batches, workers)
def test_workers_share_windows_only_at_the_end(sizes: list[int], batch: int, count: int) -> None:
    pieces = pieces_of(sizes)
    every = parts_of(pieces, batch, count)
    lanes = Lanes(pieces, batch, count, "join")
    while steps := lanes._refill():
        lanes._advance(steps)
    shared = {place for low, high in lanes.left() for place in range(low, high)}
    # each lane has less than a batch and one window
    assert len(shared) <= count * (batch + max(sizes))
    owners: dict[int, set[int]] = {}
    for worker, parts in enumerate(every):
        for place in records(parts):
            if place not in shared:
                window = next(n for n, one in enumerate(pieces) if one[0] <= place < one[1])
                owners.setdefault(window, set()).add(worker)
    assert all(len(own) == 1 for own in owners.values())


# -- `WindowOrder`: every record once, near each other on disk, and equal for an equal seed -------

groups = st.lists(st.integers(0, 9), min_size=1, max_size=12)


@given(groups, st.none() | st.integers(0, 2**40), st.integers(1, 30))
def test_order_has_every_record_once(rows: list[int], seed: int | None, window: int) -> None:
    order = WindowOrder(rows, seed=seed, rows=window)
    assert len(order) == sum(rows)
    assert sorted(order) == list(range(sum(rows)))
    assert order == WindowOrder(rows, seed=seed, rows=window)
    if seed is None:
        assert list(order) == list(range(sum(rows)))


@given(groups, st.integers(0, 2**40), st.integers(1, 30), st.data())
def test_slices_are_parts_of_the_order(
    rows: list[int], seed: int, window: int, data: st.DataObject
) -> None:
    order = WindowOrder(rows, seed=seed, rows=window)
    whole = [order[place] for place in range(len(order))]
    start, stop = data.draw(st.tuples(*[st.integers(0, len(order))] * 2))
    assert order[start:stop] == whole[start:stop]
    assert order[::2] == whole[::2]


@given(groups, st.integers(0, 2**40), st.integers(1, 30))
def test_window_is_the_records_of_some_groups(rows: list[int], seed: int, window: int) -> None:
    order = WindowOrder(rows, seed=seed, rows=window)
    firsts = [sum(rows[:group]) for group in range(len(rows))]
    for one in order.windows:
        own = [n for group in one.groups for n in range(firsts[group], firsts[group] + rows[group])]
        assert sorted(order[one.start : one.stop]) == sorted(own)
    # only the last one is short, and none is longer than its last group makes it
    for one in order.windows[:-1]:
        assert one.stop - one.start >= window > one.stop - one.start - rows[one.groups[-1]]


def test_seed_decides_the_order_of_groups_and_of_records() -> None:
    first, second = (list(WindowOrder([50] * 8, seed=seed, rows=50)) for seed in (1, 2))
    assert first != second
    assert [n // 50 for n in first] != [n // 50 for n in second]


def test_position_outside_is_an_error() -> None:
    order = WindowOrder([3], seed=None, rows=1)
    assert order[-1] == 2
    with pytest.raises(IndexError, match="position 3, expected one of 3"):
        order[3]


# -- `SeededRng`: its own random numbers, with the global generators unchanged --------------------

DRAWS: list[Callable[[], object]] = [
    lambda: torch.rand(3).tolist(),
    lambda: np.random.rand(3).tolist(),
    lambda: [random.random() for _ in range(3)],
]


@pytest.mark.parametrize("draw", DRAWS)
def test_numbers_in_the_block_follow_the_seed(draw: Callable[[], object]) -> None:
    drawn = []
    for seed in (2**62, 2**62, 5):
        with SeededRng(seed):
            drawn.append(draw())
    assert drawn[0] == drawn[1] != drawn[2]


@pytest.mark.parametrize("draw", DRAWS)
def test_generators_outside_the_block_are_unchanged(draw: Callable[[], object]) -> None:
    def outside(rng: SeededRng | None) -> object:
        torch.manual_seed(1)
        np.random.seed(1)
        random.seed(1)
        if rng is not None:
            with rng:
                draw()
        return draw()

    rng = SeededRng(3)
    assert outside(None) == outside(rng) == outside(rng)


@pytest.mark.parametrize("draw", DRAWS)
def test_a_second_block_continues(draw: Callable[[], object]) -> None:
    with SeededRng(3):
        twice = [draw(), draw()]
    rng, again = SeededRng(3), []
    for _ in range(2):
        with rng:
            again.append(draw())
        draw()
    assert again == twice


def test_an_error_in_the_block_restores_the_generators() -> None:
    torch.manual_seed(1)
    expected = torch.rand(1)
    torch.manual_seed(1)
    with pytest.raises(KeyError), SeededRng(3):
        raise KeyError
    assert torch.rand(1) == expected
