# SPDX-License-Identifier: Apache-2.0
"""Sharded streams without a DataLoader."""

import random
from collections.abc import Iterator

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.data.simulated import Stream
from torch.utils.data import IterableDataset

from fleetlight.data.order.blocks import Blocks
from fleetlight.data.sources.stream import ShardedStream, SharedBatch


def as_list(records: list[int]) -> list[int]:
    return records


def sharded(
    stream: IterableDataset[int], n: int, batch: int, tail: str, taken: int = 0, epoch: int = 0
) -> list[list[SharedBatch]]:
    """The batches of each of n workers."""
    result = []
    for worker in range(n):
        part = ShardedStream(stream, Blocks(0, batch, n, tail), worker, as_list, processes=1)
        part.start_at(epoch, 7, 0, [taken])
        result.append(list(part))
    return result


lengths, sizes, counts = st.integers(0, 60), st.integers(1, 5), st.integers(1, 5)


@settings(deadline=None)
@given(lengths, sizes, counts, st.integers(0, 70))
def test_a_joined_stream_loses_and_repeats_nothing(
    length: int, batch: int, n: int, taken: int
) -> None:
    steps = list(zip(*sharded(Stream(length), n, batch, "join", taken), strict=True))
    seen = [record for step in steps for part in step for record in part.batch[: part.mine]]
    assert seen == list(range(taken, length))
    assert sum(step[0].taken for step in steps) == len(seen)
    assert all(part.total == sum(p.mine for p in step) for step in steps for part in step)


@settings(deadline=None)
@given(lengths, sizes, counts, st.integers(0, 70))
def test_the_drop_tail_omits_the_short_block(length: int, batch: int, n: int, taken: int) -> None:
    steps = list(zip(*sharded(Stream(length), n, batch, "drop", taken), strict=True))
    seen = [record for step in steps for part in step for record in part.batch]
    rest = max(0, length - taken)
    assert seen == list(range(taken, taken + rest - rest % (batch * n)))


@settings(deadline=None)
@given(lengths, sizes, counts, st.integers(0, 70))
def test_the_pad_tail_repeats_the_first_records(
    length: int, batch: int, n: int, taken: int
) -> None:
    steps = list(zip(*sharded(Stream(length), n, batch, "pad", taken), strict=True))
    seen = [record for step in steps for part in step for record in part.batch]
    assert len(seen) % (batch * n) == 0
    rest = max(0, length - taken)
    assert seen[:rest] == list(range(taken, length))
    reserve = range(min(length, batch * n))
    assert seen[rest:] == [reserve[i % len(reserve)] for i in range(len(seen) - rest)]


def test_the_stream_receives_the_epoch() -> None:
    stream = Stream(3)
    sharded(stream, 2, 1, "join", epoch=4)
    assert stream.epochs == [4, 4]


class Shuffling(IterableDataset[float]):
    """Draws from two libraries while it is read."""

    def __iter__(self) -> Iterator[float]:
        for _ in range(8):
            yield torch.rand(1).item() + random.random()


def test_random_numbers_in_a_stream_are_equal_on_all_workers() -> None:
    torch.manual_seed(0)
    states = torch.get_rng_state(), random.getstate()
    workers = []
    for worker in range(2):
        part = ShardedStream(Shuffling(), Blocks(0, 2, 2), worker, as_list, processes=1)
        part.start_at(0, 7, 0, [0])
        batches = []
        for shared in part:
            torch.rand(worker + 1)  # the worker draws its own numbers between batches
            batches.append(shared.batch)
        workers.append(batches)
    (alone,) = sharded(Shuffling(), 1, 4, "join")
    assert [[*a, *b] for a, b in zip(*workers, strict=True)] == [s.batch for s in alone]
    torch.set_rng_state(states[0])
    random.setstate(states[1])
    sharded(Shuffling(), 2, 2, "join")
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]


def test_random_numbers_differ_between_epochs() -> None:
    first, again, other = (sharded(Shuffling(), 1, 8, "join", epoch=e)[0] for e in (0, 0, 1))
    assert first == again != other


def test_a_finished_turn_is_skipped() -> None:
    part = ShardedStream(Stream(4), Blocks(0, 2, 1), 0, as_list, processes=2)
    part.start_at(0, 0, 1, [2, 0])
    shared = list(part)
    assert [(s.taken, s.batch) for s in shared] == [(0, None), (2, [2, 3])]
