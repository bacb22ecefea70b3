# SPDX-License-Identifier: Apache-2.0
"""`parquet` reads objects of a bucket: those of a pattern, and only the columns that it needs."""

import io
from collections import Counter

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.data.columns.making import numbers, shards
from tests.store.s3 import FaultProxy, Status

import fleetlight as fleet
from fleetlight.errors import DataError, StoreError
from fleetlight.store import ObjectStore, store_at


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
