# SPDX-License-Identifier: Apache-2.0
"""`deal="shards"`: each worker reads shards of its own, with equal steps and exact positions."""

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.data.simulated import Numbers, Stream
from tests.data.sources.sharded_streams import ShardedNumbers, Unsaying, counted, read, split
from torch.utils.data import DataLoader

from fleetlight.data import ShardLoader
from fleetlight.data.observer import NoObserver
from fleetlight.errors import CheckpointError, ConfigError, DataError

sizes = st.lists(st.integers(1, 30), min_size=5, max_size=9)
workers = st.sampled_from([1, 2, 3, 5])


@given(sizes, workers, st.integers(1, 4))
def test_every_record_counts_once_an_epoch(shards: list[int], n: int, batch: int) -> None:
    loaders = split(lambda: DataLoader(ShardedNumbers.of(shards), batch), n)
    for epoch in range(2):
        assert {one.epoch for one in loaders} == {epoch}
        batches = read(loaders)
        assert counted(batches) == Counter(range(sum(shards)))
        assert len({len(one) for one in batches}) == 1
    assert {one.epoch for one in loaders} == {2}


@given(sizes, workers, st.lists(st.integers(1, 12), max_size=4), st.booleans())
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
