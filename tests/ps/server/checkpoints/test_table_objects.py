# SPDX-License-Identifier: Apache-2.0
"""Tables as objects: cut into files of whole buckets, read back by any number of servers."""

import itertools
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.ps.serving import Worker, opened, plan
from tests.store.s3 import FaultProxy, Status

from fleetlight.errors import CheckpointError
from fleetlight.kernels import BUCKETS
from fleetlight.ps import messages as m
from fleetlight.ps.placement import buckets_of
from fleetlight.ps.server.checkpoints import checkpoint_handler
from fleetlight.ps.server.checkpoints.checkpoint_handler import cuts_of
from fleetlight.ps.tables.table_file import TableReader
from fleetlight.store import store_at

IDS = list(range(-3000, 3000))


@pytest.fixture(autouse=True)
def _small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several files for a table of few rows."""
    monkeypatch.setattr(
        checkpoint_handler.TableObjects.__init__, "__defaults__", (64 << 20, 4 << 10)
    )


def trained(ids: list[int] = IDS) -> Worker:
    worker = Worker(opened(plan("async", workers=1)), 0, 1)
    worker.push(0, {0: (ids, ids), 1: ([5], [5])}, [1, 2, 3])
    return worker


def save(worker: Worker, url: str) -> m.Saved:
    store_at(url).put("token", b"")
    reply: m.Saved = worker.say(m.Save(url, "token", 0))[0]
    return reply


def load(url: str, files: list[m.TableFile], server: int = 0, servers: int = 1) -> Worker:
    """A server that loads the files which may have rows of its own."""
    mine = buckets_of(server, servers)
    here = [
        f for f in files if f.buckets and f.buckets[0] < mine.stop and mine.start < f.buckets[1]
    ]
    sums = {file.name: (file.bytes, file.sha256) for file in here}
    message = m.Load(url, [(f.table, f.name) for f in here], epoch=1, sums=sums)
    one = Worker(opened(plan("async", workers=1, server_num=servers), index=server), 0, 1, servers)
    one.say(msgspec.structs.replace(message, dry=True))
    one.say(message)
    return one


def test_another_number_of_servers_loads_its_own_rows(tmp_path: Path) -> None:
    url = tmp_path.as_uri()
    saved = save(trained(), url)
    assert len([f for f in saved.files if f.table == 0]) > 10
    assert sum(f.rows for f in saved.files) == len(IDS) + 1
    servers = [load(url, saved.files, n, 3) for n in range(3)]
    rows = np.array([one.pull(0, IDS, insert=False) for one in servers])
    np.testing.assert_array_equal(rows.sum(0), -np.array(IDS))


def test_each_file_is_the_file_of_a_table(tmp_path: Path) -> None:
    saved = save(trained(), tmp_path.as_uri())
    spans = []
    for file in saved.files[:-1]:
        reader = TableReader(tmp_path / file.name)
        reader.compare(file.bytes, file.sha256)
        assert file.buckets is not None
        assert reader.span(range(*file.buckets)) == reader.span(None) == (0, file.rows)
        assert file.rows
        spans.append(file.buckets)
    assert spans == sorted(spans)
    assert all(one[1] <= other[0] for one, other in itertools.pairwise(spans))


def test_servers_fetch_little_that_is_not_theirs(bucket: str, s3: FaultProxy) -> None:
    saved = save(trained(), bucket)
    whole = sum(file.bytes for file in saved.files)
    before = s3.fetched()
    for server in range(3):
        load(bucket, saved.files, server, 3)
    read = s3.fetched() - before
    shared = 2 * max(file.bytes for file in saved.files)
    assert whole < read < whole + shared + 20_000, "lists of objects are small"


def test_an_empty_table(tmp_path: Path) -> None:
    worker = Worker(opened(plan("async", workers=1)), 0, 1)
    worker.push(0, {0: ([], [])}, [1, 2, 3])
    saved = save(worker, tmp_path.as_uri())
    assert [(f.table, f.rows) for f in saved.files] == [(0, 0), (1, 0)]
    assert load(tmp_path.as_uri(), saved.files).server.metrics().rows["users"] == 0


def test_a_changed_file_stops_the_load_and_says_that_tables_are_not_whole(tmp_path: Path) -> None:
    url = tmp_path.as_uri()
    saved = save(trained(), url)
    path = tmp_path / saved.files[3].name
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    told = r"part00003.* was changed after it was written: .*The tables of server 0 are not whole"
    with pytest.raises(CheckpointError, match=told):
        load(url, saved.files)


def test_a_missing_file_is_found_before_anything_changes(tmp_path: Path) -> None:
    url = tmp_path.as_uri()
    saved = save(trained(), url)
    store_at(url).delete([saved.files[2].name])
    with pytest.raises(CheckpointError, match=r"part00002\.safetensors is missing; load another"):
        load(url, saved.files)


def test_another_bucket_is_an_error(tmp_path: Path) -> None:
    told = "server 0 does not see the object of worker 0 under"
    with pytest.raises(CheckpointError, match=told):
        trained().say(m.Save(tmp_path.as_uri(), "token", 0))


def test_an_upload_that_fails_frees_the_cut(
    bucket: str, s3: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint_handler, "store_at", lambda url: store_at(url, deadline_s=0.1))
    worker = trained()
    s3.rule = lambda method, path: Status(500) if "part00004" in path else None
    with pytest.raises(CheckpointError, match=r"server 0 could not write table 'users'.*HTTP 500"):
        save(worker, bucket)
    s3.rule = lambda method, path: None
    saved = save(worker, bucket)
    assert sum(f.rows for f in saved.files) == len(IDS) + 1


@given(
    st.lists(st.tuples(st.integers(0, BUCKETS - 1), st.integers(1, 50)), max_size=30),
    st.integers(1, 400),
)
def test_cuts_cover_all_rows_once(filled: list[tuple[int, int]], least: int) -> None:
    counts = np.zeros(BUCKETS, np.int64)
    for bucket, rows in filled:
        counts[bucket] = rows
    starts = np.concatenate([[0], counts.cumsum()])
    cuts = cuts_of(starts, 10, most=1000, least=least)
    rows = [int(starts[cut.stop] - starts[cut.first]) for cut in cuts]
    assert sum(rows) == starts[-1]
    assert all(rows) or not counts.any()
    for one, other in itertools.pairwise(cuts):
        assert one.first < one.stop <= other.first
    for cut, size in zip(cuts, rows, strict=True):
        # as large as asked for, unless one bucket is larger
        assert size * 10 <= 1000 or cut.stop == cut.first + 1
