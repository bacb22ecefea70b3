# SPDX-License-Identifier: Apache-2.0
"""Workers share columnar files: every record once, exact positions, own groups."""

import io
import itertools
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.data.columns.making import groups_read, numbered, numbers, shards
from tests.data.queued import records, run, workers_of
from tests.errors import refuses
from tests.store.s3 import FaultProxy, Status
from tests.workers import run_workers
from torch.utils.data import DataLoader

import fleetlight as fleet
from fleetlight.data.columns.dataset import ColumnFiles
from fleetlight.data.loader import ShardLoader
from fleetlight.errors import CheckpointError, DataError, StoreError
from fleetlight.store import ObjectStore, store_at

SIZES = [25, 7, 40, 13, 18]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> ColumnFiles:
    return fleet.data.parquet(numbered(tmp_path_factory.mktemp("files"), SIZES))


@pytest.mark.parametrize("workers", [1, 2, 3, 5])
@pytest.mark.parametrize("shuffle", [False, True])
def test_every_record_counts_once_an_epoch(data: ColumnFiles, workers: int, shuffle: bool) -> None:
    every = shards(data.loader(4, shuffle=shuffle, window=10), workers)
    for _ in range(2):
        read = [numbers(one) for one in every]
        assert sum(read, Counter()) == Counter(range(len(data)))
        assert max(one.total() for one in read) - min(one.total() for one in read) <= 4
    assert {len(one) for one in every} == {-(-len(data) // (4 * workers))}


def test_a_resumed_worker_reads_only_what_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = groups_read(monkeypatch)

    def loader() -> ShardLoader[Any]:
        return shards(fleet.data.parquet(tmp_path).loader(7, window=10), 2)[1]

    # groups of 10 records
    numbered(tmp_path, [100, 100])
    one, whole = loader(), []
    for number, batch in enumerate(one):
        whole.append(batch["number"].tolist())
        if number == 7:
            state = one.state_dict()
    uninterrupted = sorted(read)
    read.clear()
    other = loader()
    other.load_state_dict(state)
    assert [batch["number"].tolist() for batch in other] == whole[8:]
    # none of the groups before the position, which are half of all
    assert len(read) == len(set(read)) <= len(uninterrupted) // 2 + 2
    assert max(uninterrupted) == max(read)


@given(
    st.lists(st.tuples(st.sampled_from([1, 2, 3, 5]), st.integers(1, 7), st.integers(0, 12))),
    st.integers(0, 3),
    st.booleans(),
)
def test_other_workers_resume_at_any_record(
    data: ColumnFiles, stops: list[tuple[int, int, int]], seed: int, shuffle: bool
) -> None:
    read: Counter[int] = Counter()
    state: Any = None
    for workers, batch, steps in [*stops, (2, 3, 10**6)]:
        every = shards(data.loader(batch, shuffle=shuffle, window=20), workers, seed=seed)
        for one in every:
            if state is not None:
                one.load_state_dict(state)
                if one.epoch:
                    break
            if steps:
                read += numbers(one, steps)
        if every[0].epoch and every[0].consumed == 0:
            break
        state = every[0].state_dict()
    assert read == Counter(range(len(data)))


def test_same_workers_resume_exactly(data: ColumnFiles) -> None:
    def run(stop: int) -> list[list[list[int]]]:
        found = []
        for n in range(3):
            loader = data.loader(4, shuffle=True, window=20)
            one = shards(loader, 3)[n]
            batches = []
            for step, batch in enumerate(one, start=1):
                batches.append(batch["number"].tolist())
                if step == stop:
                    break
            again = shards(loader, 3)[n]
            again.load_state_dict(one.state_dict())
            batches += [batch["number"].tolist() for batch in again]
            found.append(batches)
        return found

    assert run(1) == run(4) == run(7)


def test_worker_reads_only_its_own_groups_but_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = groups_read(monkeypatch)
    for one in range(3):
        data = fleet.data.parquet(numbered(tmp_path, [300, 300]))
        numbers(shards(data.loader(5, shuffle=True, window=10), 3)[one])
    # 60 groups; those of the last windows are read by all
    assert len(set(read)) == 60
    assert len(read) <= 60 + 3 * 3


def test_position_in_other_files_is_refused(data: ColumnFiles, tmp_path: Path) -> None:
    one = shards(data.loader(4), 1)[0]
    numbers(one, 2)
    other = shards(fleet.data.parquet(numbered(tmp_path, [103])).loader(4), 1)[0]
    with refuses(CheckpointError, "in the order '5 files, 103", "the order '1 files, 103"):
        other.load_state_dict(one.state_dict())


@pytest.mark.parametrize("deal", ["blocks", "queue"])
@pytest.mark.parametrize("other", [{"window": 30}, {"shuffle": False}])
def test_position_in_another_order_is_refused(
    data: ColumnFiles, other: dict[str, Any], deal: str
) -> None:
    def made(**settings: Any) -> ShardLoader[Any]:
        loader = data.loader(4, **{"shuffle": True, "window": 20, **settings})
        if deal == "queue":
            return workers_of(1, lambda: loader)[0].loader
        return shards(loader, 1, seed=0)[0]

    one = made()
    at_start = one.state_dict()
    numbers(one, 3)
    with pytest.raises(CheckpointError, match="shuffled in windows of 20', but this loader"):
        made(**other).load_state_dict(one.state_dict())
    after = made(**other)
    after.load_state_dict(at_start)
    assert numbers(after) == Counter(range(len(data)))


def test_epoch_that_has_not_begun_may_change_its_files_and_kind_of_loader(
    data: ColumnFiles, tmp_path: Path
) -> None:
    before = DataLoader(data, 4, shuffle=True, collate_fn=data.collate)
    for state in (shards(data.loader(4), 2)[0].state_dict(), shards(before, 2)[0].state_dict()):
        others = fleet.data.parquet(numbered(tmp_path, [50]))
        one = shards(others.loader(4, shuffle=True), 1)[0]
        one.load_state_dict(state)
        assert numbers(one) == Counter(range(50))


def number_columns(folder: Path) -> ColumnFiles:
    return fleet.data.parquet(numbered(folder, SIZES), transform=lambda batch: batch["number"])


def test_queue_deals_windows_out(tmp_path: Path) -> None:
    data = number_columns(tmp_path)
    workers = workers_of(3, lambda: data.loader(4, shuffle=True, window=20))
    for epoch in range(2):
        run(workers)
        assert records(*workers) == sorted(list(range(len(data))) * (epoch + 1))


def test_queue_and_lanes_continue_each_other(tmp_path: Path) -> None:
    data = number_columns(tmp_path)

    def make() -> DataLoader[Any]:
        return data.loader(4, shuffle=True, window=20)

    lanes = shards(make(), 2, seed=0)
    read = [n for one in lanes for batch in itertools.islice(one, 3) for n in batch.tolist()]
    state = lanes[0].cursor.shared_state()
    workers = workers_of(3, make)
    for worker in workers:
        worker.loader.load_state_dict(state)
    for part in [worker.epoch() for worker in workers]:
        next(part)
    for worker in workers:
        worker.loader.source.report()
    left = workers[0].loader.cursor.shared_state()
    again = shards(make(), 5, seed=0)
    read += records(*workers)
    for one in again:
        one.load_state_dict(left)
        read += [n for batch in one for n in batch[: one.counted].tolist()]
    assert Counter(read) == Counter(range(len(data)))


def test_queue_refuses_the_state_dict_of_lanes(tmp_path: Path) -> None:
    data = number_columns(tmp_path)
    one = shards(data.loader(4), 1)[0]
    next(iter(one))
    (worker,) = workers_of(1, lambda: data.loader(4))
    with pytest.raises(CheckpointError, match="state_dict of a loader without deal='queue'"):
        worker.loader.load_state_dict(one.state_dict())


def train(files: str, folder: str, steps: int | None) -> list[int]:
    """The records that this worker trains on: from a checkpoint on, and up to one."""
    model = fleet.distributed_model(torch.nn.Linear(1, 1))
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=1e-6))
    loader = fleet.shard(fleet.data.parquet(files).loader(4, shuffle=True, window=20))
    if steps is None:
        fleet.load_persistables(folder)
    read: list[int] = []
    for step, batch in enumerate(loader, start=1):
        optimizer.zero_grad()
        model(batch["number"][:, None].float()).mean().backward()
        optimizer.step()
        read += batch["number"][: loader.counted].tolist()
        if step == steps:
            fleet.save_persistables(folder)
            break
    return read


@pytest.mark.multiprocess
@pytest.mark.parametrize("after", [3, 1])
def test_job_resumes_with_other_workers_from_a_checkpoint(tmp_path: Path, after: int) -> None:
    files = numbered(tmp_path, SIZES)
    before = run_workers(train, 2, str(files), str(tmp_path / "saved"), 5)
    rest = run_workers(train, after, str(files), str(tmp_path / "saved"), None)
    assert Counter(itertools.chain(*before, *rest)) == Counter(range(sum(SIZES)))


# -- `parquet` reads objects of a bucket: those of a pattern, and only the columns that it needs


def parquet_bytes(first: int, records: int) -> bytes:
    wide = {f"wide{n}": np.random.default_rng(n).random(records) for n in range(20)}
    file = io.BytesIO()
    table = pa.table({"number": range(first, first + records), **wide})
    pq.write_table(table, file, row_group_size=2_000)
    return file.getvalue()


@pytest.fixture
def store(bucket: str) -> ObjectStore:
    made = store_at(bucket)
    for day in (19, 20, 21):
        made.put(f"day={day}/part.parquet", parquet_bytes(day * 10_000, 5_000))
    made.put("day=20/_SUCCESS", b"")
    made.put("day=20/_tmp/x.parquet", b"half-written")
    made.put("_temporary/part.parquet", b"half-written")
    return made


def test_objects_of_a_pattern_are_read(store: ObjectStore) -> None:
    for path, days in (
        ("", (19, 20, 21)),
        ("/", (19, 20, 21)),
        ("/day=2*", (20, 21)),
        ("/day=2*/", (20, 21)),
        ("/day=*/part.parquet", (19, 20, 21)),
        ("/*/", (19, 20, 21)),
        ("/*/part.parquet", (19, 20, 21)),
        ("/day=19/part.parquet", (19,)),
    ):
        data = fleet.data.parquet(f"{store.url}{path}", ["number", "day"])
        assert len(data) == 5_000 * len(days), path
        assert set(data.batch(range(len(data)))["day"].tolist()) == set(days)
    with pytest.raises(DataError, match=r"got s3://.*/day=3\*: no such file; expected a file"):
        fleet.data.parquet(f"{store.url}/day=3*")
    with pytest.raises(DataError, match=r"day=20/part.parquet: got the file twice, by 's3://.*'"):
        fleet.data.parquet([f"{store.url}/day=2*", f"{store.url}/*/part.parquet"])


def test_workers_share_the_objects(store: ObjectStore) -> None:
    loader = fleet.data.parquet(store.url, ["number"]).loader(64, shuffle=True, window=2_000)
    read = sum((numbers(one) for one in shards(loader, 3)), Counter())
    assert read == Counter(
        n for day in (19, 20, 21) for n in range(day * 10_000, day * 10_000 + 5_000)
    )


def test_server_errors_are_retried(store: ObjectStore, s3: FaultProxy) -> None:
    data = fleet.data.parquet(store.url, ["number"])
    s3.fail(Status(500), method="GET", times=3)
    assert len(data.batch(range(15_000))["number"]) == 15_000
    assert len([size for method, _, size in s3.seen if method == "GET"]) > 9


def test_only_the_columns_that_are_needed_are_read(store: ObjectStore, s3: FaultProxy) -> None:
    size = sum(entry.size for entry in store.list() if entry.name.endswith("part.parquet"))
    before = s3.fetched()
    fleet.data.parquet(store.url, ["number"]).batch(range(15_000))
    # one column of 21, and the least that is read at once: for 3 footers and 9 row groups
    assert s3.fetched() - before < min(size / 2, size / 21 + 13 * (1 << 16))


def test_counting_the_records_of_arrow_files_reads_one_column(bucket: str, s3: FaultProxy) -> None:
    file, names = io.BytesIO(), [f"wide{n}" for n in range(20)]
    number = pa.array(range(50_000), pa.int32())
    table = pa.table({"number": number, **dict.fromkeys(names, np.zeros(50_000))})
    with pa.ipc.new_file(file, table.schema) as to:
        to.write_table(table)
    store_at(bucket).put("a.arrow", file.getvalue())
    before = s3.fetched()
    assert len(fleet.data.arrow(bucket, ["number"])) == 50_000
    assert s3.fetched() - before < len(file.getvalue()) / 10


def test_changed_and_deleted_objects_are_errors(store: ObjectStore) -> None:
    data = fleet.data.parquet(store.url, ["number"])
    store.put("day=19/part.parquet", parquet_bytes(0, 5_001))
    store.delete(["day=20/part.parquet"])
    with pytest.raises(DataError, match=r"day=19/part\.parquet: the file has changed"):
        data.batch([0])
    with pytest.raises(DataError, match=r"day=20/part\.parquet: the object has been deleted"):
        data.batch([5_000])


def test_bucket_that_does_not_exist_is_an_error(s3: FaultProxy) -> None:
    with pytest.raises(StoreError, match="no-such-bucket"):
        fleet.data.parquet("s3://no-such-bucket/day=*/")
