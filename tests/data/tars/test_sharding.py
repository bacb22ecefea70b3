# SPDX-License-Identifier: Apache-2.0
"""Workers share tar files: every sample once, exact positions, with a queue, from a bucket."""

import itertools
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.data.columns.making import numbers, shards
from tests.data.queued import records, run, workers_of
from tests.data.tars.making import numbered
from tests.store.s3 import FaultProxy

import fleetlight as fleet
from fleetlight.data import TarFiles
from fleetlight.data.tars import shard
from fleetlight.store import store_at

SIZES = [25, 7, 40, 13, 18]
FIELDS = {"number": "cls"}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TarFiles]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shard, "GROUP_BYTES", 10 * 3 * 1024)
        yield fleet.data.webdataset(numbered(tmp_path_factory.mktemp("tars"), SIZES), FIELDS)


@pytest.mark.parametrize("workers", [1, 2, 3, 5])
@pytest.mark.parametrize("shuffle", [False, True])
def test_every_sample_counts_once_an_epoch(data: TarFiles, workers: int, shuffle: bool) -> None:
    every = shards(data.loader(4, shuffle=shuffle, window=10), workers)
    for _ in range(2):
        read = [numbers(one) for one in every]
        assert sum(read, Counter()) == Counter(range(len(data)))
        assert max(one.total() for one in read) - min(one.total() for one in read) <= 4


@given(
    st.lists(st.tuples(st.sampled_from([1, 2, 3, 5]), st.integers(1, 7), st.integers(0, 12))),
    st.booleans(),
)
def test_other_workers_resume_at_any_sample(
    data: TarFiles, stops: list[tuple[int, int, int]], shuffle: bool
) -> None:
    read: Counter[int] = Counter()
    state: Any = None
    for workers, batch, steps in [*stops, (2, 3, 10**6)]:
        every = shards(data.loader(batch, shuffle=shuffle, window=20), workers)
        for one in every:
            if state is not None:
                one.load_state_dict(state)
            if steps and not one.epoch:
                read += numbers(one, steps)
        if every[0].epoch and every[0].consumed == 0:
            break
        state = every[0].state_dict()
    assert read == Counter(range(len(data)))


def test_loading_processes_read_their_own_samples(data: TarFiles) -> None:
    every = shards(data.loader(4, shuffle=True, window=20, num_workers=2), 2)
    for one, same in zip(every, shards(data.loader(4, shuffle=True, window=20), 2), strict=True):
        batches = [batch["number"].tolist() for batch in one]
        assert batches == [batch["number"].tolist() for batch in same]


def test_queue_deals_windows_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard, "GROUP_BYTES", 5 * 3 * 1024)
    read: list[int] = []
    plain = TarFiles._load
    monkeypatch.setattr(TarFiles, "_load", lambda self, n: read.append(n) or plain(self, n))
    data = fleet.data.webdataset(
        numbered(tmp_path, SIZES), ["cls"], transform=lambda one: one["cls"]
    )
    workers = workers_of(3, lambda: data.loader(4, shuffle=True, window=20), range_batches=5)
    run(workers)
    assert records(*workers) == list(range(len(data)))
    # the groups of each range, and not sample by sample
    assert set(read) == set(range(len(data.group_rows)))
    assert len(read) <= 3 * len(data.group_rows)


def test_shards_in_a_bucket_are_read(
    tmp_path: Path, bucket: str, s3: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shard, "GROUP_BYTES", 10 * 3 * 1024)
    store = store_at(bucket)
    for file in sorted(numbered(tmp_path, SIZES).iterdir()):
        store.put(f"clicks/{file.name}", file)
    kept = f"{bucket}/index"
    name = f"{bucket}/clicks/train-{{000..004}}.tar"
    assert len(fleet.data.webdataset(name, FIELDS, index=kept)) == sum(SIZES)
    before = s3.fetched()
    data = fleet.data.webdataset(name, FIELDS, index=kept)
    # indices and nothing else
    assert s3.fetched() - before < 5 * 1024
    for settings in ({"num_workers": 0}, {"shuffle": True, "window": 20}):
        read = sum((numbers(one) for one in shards(data.loader(4, **settings), 3)), Counter())
        assert read == Counter(range(sum(SIZES)))
    assert [one["number"] for one in data.__getitems__([99, 0, 42])] == [99, 0, 42]


def test_position_in_other_files_is_refused(data: TarFiles, tmp_path: Path) -> None:
    one = shards(data.loader(4), 1)[0]
    numbers(one, 2)
    other = shards(fleet.data.webdataset(numbered(tmp_path, [103]), FIELDS).loader(4), 1)[0]
    with pytest.raises(
        fleet.errors.CheckpointError, match=r"in the order '5 files, .* has the order '"
    ):
        other.load_state_dict(one.state_dict())


def test_same_workers_resume_exactly(data: TarFiles) -> None:
    def read(stop: int) -> list[list[int]]:
        found = []
        for n in range(3):
            loader = data.loader(4, shuffle=True, window=20)
            one, again = shards(loader, 3)[n], shards(loader, 3)[n]
            found += [batch["number"].tolist() for batch in itertools.islice(one, stop)]
            again.load_state_dict(one.state_dict())
            found += [batch["number"].tolist() for batch in again]
        return found

    assert read(1) == read(4) == read(7)
