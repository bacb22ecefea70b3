# SPDX-License-Identifier: Apache-2.0
"""`deal="shards"`: each worker reads shards of its own, with equal steps and exact positions."""

import random
import weakref
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.data.simulated import Numbers, Stream
from tests.data.sources.sharded_streams import ShardedNumbers, Unsaying, counted, read, split
from tests.launch.workplace import wait_until
from torch.utils.data import DataLoader, IterableDataset

from fleetlight.data import ShardLoader
from fleetlight.data.observer import NoObserver
from fleetlight.data.order.blocks import Blocks
from fleetlight.data.sources.loaded_groups import _MAX_UNREAD, _PATIENCE, LoadedGroups
from fleetlight.data.sources.stream import ShardedStream, SharedBatch
from fleetlight.errors import CheckpointError, ConfigError, DataError

shard_sizes = st.lists(st.integers(1, 30), min_size=5, max_size=9)
workers = st.sampled_from([1, 2, 3, 5])


@given(shard_sizes, workers, st.integers(1, 4))
def test_every_record_counts_once_an_epoch(shards: list[int], n: int, batch: int) -> None:
    loaders = split(lambda: DataLoader(ShardedNumbers.of(shards), batch), n)
    for epoch in range(2):
        assert {one.epoch for one in loaders} == {epoch}
        batches = read(loaders)
        assert counted(batches) == Counter(range(sum(shards)))
        assert len({len(one) for one in batches}) == 1
    assert {one.epoch for one in loaders} == {2}


@given(shard_sizes, workers, st.lists(st.integers(1, 12), max_size=4), st.booleans())
def test_same_workers_resume_at_any_step(
    shards: list[int], n: int, stops: list[int], says: bool
) -> None:
    kind = ShardedNumbers if says else Unsaying

    def loaders() -> list[ShardLoader[Any]]:
        return split(lambda: DataLoader(kind.of(shards), 2), n)

    every = loaders()
    whole = read(every, None)
    found: list[list[list[int]]] = [[] for _ in range(n)]
    every = loaders()
    for stop in [*stops, None]:
        for own, one in zip(found, read(every, stop), strict=True):
            own += one
        if len(found[0]) == len(whole[0]):
            break
        states = [one.state_dict() for one in every]
        every = loaders()
        for one, state in zip(every, states, strict=True):
            one.load_state_dict(state)
    assert found == whole


def test_workers_agree_once_in_eight_steps() -> None:
    loaders = split(lambda: DataLoader(ShardedNumbers.of([32, 32]), 2), 2)
    meeting: Any = loaders[0].source._agree.__closure__[0].cell_contents  # type: ignore[attr-defined]
    assert [len(one) for one in read(loaders)] == [16, 16]
    # twice for 8 steps, once for the end
    assert 1 <= meeting.calls <= 3


def test_drop_ends_with_the_first_worker() -> None:
    loaders = split(lambda: DataLoader(ShardedNumbers.of([9, 50]), 2), 2, tail="drop")
    assert [len(one) for one in read(loaders)] == [4, 4]
    loaders = split(lambda: DataLoader(ShardedNumbers.of([9, 5]), 2, drop_last=True), 2)
    assert counted(read(loaders)) == Counter([*range(8), *range(9, 13)])


def test_worker_without_records_takes_part() -> None:
    loaders = split(lambda: DataLoader(ShardedNumbers.of([1, 5]), 1), 2)
    assert read(loaders) == [[[0], [], [], [], []], [[1], [2], [3], [4], [5]]]
    loaders = split(lambda: DataLoader(ShardedNumbers.of([0, 5]), 1), 2)
    with pytest.raises(DataError, match="worker 0 got no record in its part of 2 shards"):
        read(loaders)


def test_workers_that_step_alone_do_not_wait() -> None:
    loaders = [
        ShardLoader(
            DataLoader(ShardedNumbers.of([3, 9]), 2),
            worker=n,
            workers=2,
            seed=0,
            tail="join",
            agree=lambda counts: None,
        )
        for n in range(2)
    ]
    assert [batch.tolist() for batch in loaders[0]] == [[0, 1], [2]]
    assert [len(batch) for batch in loaders[1]] == [2, 2, 2, 2, 1]
    assert [one.epoch for one in loaders] == [1, 1]


@pytest.mark.parametrize("stop", [1, 3, 6])
def test_loading_processes_resume(stop: int) -> None:
    def make() -> DataLoader[Any]:
        data = ShardedNumbers.of([5, 9, 2, 7])
        return DataLoader(data, 2, num_workers=2, persistent_workers=True)

    whole = read(split(make, 1))[0]
    assert counted([whole]) == Counter(range(23))
    loader, again = split(make, 1)[0], split(make, 1)[0]
    found = read([loader], stop)[0]
    again.load_state_dict(loader.state_dict())
    assert found + read([again])[0] == whole


def test_positions_of_other_workers_are_refused() -> None:
    def loaders(n: int, **more: Any) -> list[ShardLoader[Any]]:
        return split(lambda: DataLoader(ShardedNumbers.of([9] * 4), 2, **more), n)

    every = loaders(2)
    read(every, 3)
    state = every[0].state_dict()
    with pytest.raises(CheckpointError, match=r"position of 2 workers, .* resume with 2 workers"):
        loaders(3)[0].load_state_dict(state)
    with pytest.raises(CheckpointError, match=r"position of worker 0 .*, but this is worker 1"):
        loaders(2)[1].load_state_dict(state)
    with pytest.raises(CheckpointError, match="make the DataLoader with num_workers=1"):
        loaders(2, num_workers=2)[0].load_state_dict(state)
    blocks = ShardLoader(
        DataLoader(ShardedNumbers.of([9] * 4), 2), worker=0, workers=2, seed=0, tail="join"
    )
    with pytest.raises(CheckpointError, match="that a loader with deal='shards' saved"):
        blocks.load_state_dict(state)
    next(iter(blocks))
    with pytest.raises(CheckpointError, match="saved without deal='shards'"):
        loaders(2)[0].load_state_dict(blocks.state_dict())


def test_positions_of_all_workers_are_given_to_each() -> None:
    def loaders() -> list[ShardLoader[Any]]:
        return split(lambda: DataLoader(ShardedNumbers.of([9, 20]), 2), 2)

    every = loaders()
    before = read(every, 3)
    states = [one.state_dict() for one in every]
    again = loaders()
    for one in again:
        one.load_state_dict({**states[0], "each": states})
    assert counted([*before, *read(again)]) == Counter(range(29))
    # worker 0 has saved alone
    again = loaders()
    for one in again:
        one.load_state_dict({**states[0], "each": states[:1]})
    rest = read(again)
    assert counted([before[0], rest[0]]) == Counter(range(9))
    assert counted([rest[1]]) == Counter(range(15, 29))


@pytest.mark.parametrize(
    ("loader", "settings", "error"),
    [
        (DataLoader(Numbers(5), 2), {}, "deal='shards' and records by number; leave deal out"),
        (DataLoader(Stream(5), 2), {}, r"Stream is not in shards: it needs num_shards"),
        (DataLoader(ShardedNumbers.of([5]), 2), {}, "1 shards for 2 workers; write the data into"),
        (DataLoader(ShardedNumbers.of([5, 5]), None), {}, "and batch_size=None, expected"),
        (DataLoader(ShardedNumbers.of([5, 5]), 2), {"tail": "pad"}, "and tail='pad', expected"),
    ],
)
def test_what_cannot_be_split_is_refused(
    loader: DataLoader[Any], settings: dict[str, Any], error: str
) -> None:
    with pytest.raises(ConfigError, match=error):
        split(lambda: loader, 2, **settings)


def test_stream_that_is_split_already_is_refused() -> None:
    data = ShardedNumbers.of([5, 5])
    data._distributed = object()  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match="split by split_dataset_by_node already; leave that out"):
        split(lambda: DataLoader(data, 2), 2)


def test_loader_has_no_length() -> None:
    (loader,) = split(lambda: DataLoader(ShardedNumbers.of([5]), 2), 1)
    with pytest.raises(TypeError, match="has no length"):
        len(loader)
    assert loader.samples_per_step == 2


class LooksAhead(NoObserver):
    """Loads two batches early, as look-ahead does; notes the position before each batch."""

    def __init__(self) -> None:
        self.positions: list[Any] = []

    def batches_ahead(self) -> int:
        return 2

    def before_batch(self, position: Any) -> None:
        self.positions.append(position)


def test_position_before_a_batch_has_all_that_the_workers_have_agreed_on() -> None:
    """A restarted worker resumes there, and the others do not agree again."""
    observer = LooksAhead()
    read(split(lambda: DataLoader(ShardedNumbers.of([40, 40]), 2), 2, observer=observer))
    for position in observer.positions:
        left = 20 - position["consumed"] // 4
        assert len(position["agreed"]) >= min(3, left + 1)
        assert position["agreed"][0] == 4


# -- sharded streams without a DataLoader ---------------------------------------------------------


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


# -- groups in memory: each is loaded once, and few stay ------------------------------------------


class Decoded:
    """What a group becomes."""

    def __init__(self, number: int) -> None:
        self.number = number


class Counted:
    """Loaded groups, and which loads were made."""

    def __init__(self) -> None:
        self.loads: list[int] = []
        self._made: list[weakref.ref[Decoded]] = []
        self.groups = LoadedGroups(self._load)

    def _load(self, number: int) -> Decoded:
        made = Decoded(number)
        self.loads.append(number)
        self._made.append(weakref.ref(made))
        return made

    def in_memory(self) -> list[int]:
        return sorted(one.number for made in self._made if (one := made()) is not None)

    def wait_for(self, groups: list[int]) -> None:
        wait_until(lambda: self.in_memory() == groups, f"only {groups} to stay")

    def announce(self, *groups: int) -> None:
        """Windows of one group."""
        for group in groups:
            self.groups.will_read([group])

    def take(self, *batch: int) -> list[int]:
        """A batch of these groups."""
        self.groups.start_batch(batch)
        return [self.groups.get(group).number for group in batch]

    def epoch(self, first: int, windows: int) -> Iterator[list[int]]:
        """Batches of windows of one group, also one with records of two."""
        for window in range(first, first + windows):
            self.announce(*range(window, min(window + 2, first + windows)))
            yield self.take(*range(max(first, window - 1), window + 1))
            for _ in range(_PATIENCE + 1):
                yield self.take(window)


@pytest.fixture
def loaded() -> Counted:
    return Counted()


def test_a_group_is_loaded_once_and_released_after_its_window(loaded: Counted) -> None:
    for number, batch in enumerate(loaded.epoch(0, windows=8), 1):
        newest = max(batch)
        if number % (_PATIENCE + 2) == 0 and newest < 7:
            loaded.wait_for([newest, newest + 1])
    assert loaded.loads == list(range(8))


def test_loops_that_take_turns_load_each_group_once(loaded: Counted) -> None:
    for _ in zip(loaded.epoch(0, windows=6), loaded.epoch(10, windows=6), strict=True):
        pass
    assert sorted(loaded.loads) == [*range(6), *range(10, 16)]


def test_a_loop_continues_after_another_one(loaded: Counted) -> None:
    loaded.groups.will_read(range(5))
    loaded.take(0, 1, 2, 3, 4)
    for _ in loaded.epoch(10, windows=5):
        pass
    for _ in range(5):
        loaded.take(4, 0, 2, 1, 3)
    assert sorted(loaded.loads) == sorted([*range(5), *range(10, 15), *range(5)])


def test_single_records_of_a_few_groups_load_few_groups_again(loaded: Counted) -> None:
    for number in [0, 1, 2] * 20:
        loaded.take(number)
    assert len(loaded.loads) <= 6
    for number in range(3, 30):
        loaded.take(number)
    wait_until(lambda: len(loaded.in_memory()) <= 4, "older ones to leave")


def test_a_batch_of_many_groups_has_few_in_memory(loaded: Counted) -> None:
    loaded.groups.start_batch(range(30))
    for number in range(30):
        loaded.groups.get(number)
        wait_until(lambda: len(loaded.in_memory()) <= 4, "groups to leave")


def test_announcements_without_batches_keep_few_in_memory(loaded: Counted) -> None:
    loaded.announce(*range(100))
    wait_until(lambda: 99 in loaded.loads, "the last one")
    wait_until(lambda: len(loaded.in_memory()) <= _MAX_UNREAD, "older ones to leave")


def test_windows_that_come_again_are_loaded_once_more_at_most(loaded: Counted) -> None:
    for _ in range(4):
        for _ in loaded.epoch(0, windows=2):
            pass
    # the first one had left when the second epoch began
    assert loaded.loads == [0, 1, 0]


def test_windows_of_a_batch_stay_whatever_is_announced_between_them(loaded: Counted) -> None:
    loaded.announce(5, 0)
    loaded.take(5)
    loaded.announce(4, 1, 5, 2)
    loaded.take(4, 5)
    loaded.take(5)
    loaded.take(1)
    loaded.take(0, 2)
    assert loaded.loads == [5, 0, 4, 1, 2]


def test_a_window_after_a_batch_of_many_stays(loaded: Counted) -> None:
    for first in range(0, 30, 5):
        loaded.announce(*range(first, first + 6))
        for _ in range(_PATIENCE + 2):
            loaded.take(*range(first, first + 5))
    # the last one is only announced
    wait_until(lambda: 30 in loaded.loads, "the last one")
    assert loaded.loads == list(range(31))


def test_windows_of_an_abandoned_epoch_leave(loaded: Counted) -> None:
    loaded.announce(0, 1)
    loaded.take(0)
    for _ in loaded.epoch(10, windows=7):
        pass
    loaded.wait_for([16])


def test_a_window_of_several_groups_stays_while_batches_take_some(loaded: Counted) -> None:
    loaded.groups.will_read([0, 1, 2])
    loaded.groups.will_read([3, 4])
    for batch in ((0,), *[(2, 1)] * 20, (0,), (2, 4), *[(3,)] * 20, (4,)):
        loaded.take(*batch)
    assert loaded.loads == [0, 1, 2, 3, 4]
    loaded.wait_for([3, 4])


def test_what_fails_is_loaded_again(loaded: Counted) -> None:
    def fail_once(number: int) -> int:
        fails.append(number)
        if len(fails) == 1:
            raise OSError(5, "Input/output error")
        return number

    fails: list[int] = []
    groups = LoadedGroups(fail_once)
    with pytest.raises(OSError, match="Input/output error"):
        groups.get(4)
    assert groups.get(4) == 4
