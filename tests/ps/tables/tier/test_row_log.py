# SPDX-License-Identifier: Apache-2.0
"""Tables whose rows are partly on disk."""

import contextlib
import errno
import gc
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from numpy.typing import NDArray
from tests.kernels.batches import numbers, same
from tests.ps.made_tables import LR, by_id, make, ones, read, saved, some_ids

from fleetlight.errors import ConfigError, RowFileError
from fleetlight.kernels import TieredRowTable
from fleetlight.ps.plan import EntryPlan
from fleetlight.ps.tables.publishing.table_changes import TableCut
from fleetlight.ps.tables.table import Table
from fleetlight.ps.tables.tier import row_log
from fleetlight.ps.tables.tier.row_log import RowLog
from fleetlight.ps.update import Floats, Ids

# RowLog: records in a file, whose space is used again.


WIDTH, SEGMENT = 3, 5
Records = NDArray[np.float32]


def log_in(folder: Path, patience_s: float = 0.0) -> RowLog:
    return RowLog(folder, "emb", WIDTH, 4 * WIDTH * SEGMENT, patience_s)


def records(first: int, count: int) -> Records:
    return np.arange(first, first + count, dtype=np.float32)[:, None] + np.zeros(WIDTH, np.float32)


def open_files(folder: Path) -> int:
    """The open files of this process in a folder."""
    found = 0
    for file in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # another thread may have closed it
            found += os.readlink(f"/proc/self/fd/{file}").startswith(str(folder))
    return found


@settings(deadline=None, max_examples=40)
@given(st.lists(st.tuples(st.integers(0, 13), st.integers(0, 2**32 - 1)), max_size=12))
def test_records_are_found_until_they_are_dropped(
    tmp_path_factory: pytest.TempPathFactory, calls: list[tuple[int, int]]
) -> None:
    folder = tmp_path_factory.mktemp("log")
    log, known, made = log_in(folder), dict[int, int](), 0
    for count, seed in calls:
        positions = log.append(records(made, count)).tolist()
        assert not set(positions) & set(known)
        known |= dict(zip(positions, range(made, made + count), strict=True))
        made += count
        asked = np.random.default_rng(seed).permutation(list(known)).astype(np.int64)
        assert log.read(asked)[:, 0].tolist() == [known[at] for at in asked.tolist()]
        gone = asked[: len(asked) // 2]
        log.free(gone)
        for at in gone.tolist():
            del known[at]
        while (sparse := log.sparse_positions()) is not None:
            live = np.array([at for at in sparse.tolist() if at in known], np.int64)
            assert len(live) < SEGMENT / 2
            values = [known.pop(at) for at in live.tolist()]
            known |= dict(zip(log.append(log.read(live)).tolist(), values, strict=True))
            log.free(live)
        assert log.nbytes <= 4 * WIDTH * (2 * max(1, len(known)) + 2 * 6 * SEGMENT + 13)
    assert os.listdir(folder) == []


def test_neighbours_are_read_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = log_in(tmp_path)
    log.append(records(0, 40))
    reads = []
    honest = os.preadv

    def counted(file: int, views: list[memoryview], offset: int) -> int:
        reads.append((offset, len(views[0])))
        return honest(file, views, offset)

    monkeypatch.setattr(os, "preadv", counted)
    wanted = np.array([9, 7, 30, 8, 30], np.int64)
    assert log.read(wanted)[:, 0].tolist() == [9, 7, 30, 8, 30]
    assert reads == [(7 * 12, 36), (30 * 12, 12), (30 * 12, 12)]


def test_the_file_ends_with_the_log(tmp_path: Path) -> None:
    log = log_in(tmp_path / "new" / "folder")
    assert open_files(tmp_path) == 0
    log.append(records(0, 1))
    assert open_files(tmp_path) == 1
    del log
    gc.collect()
    assert open_files(tmp_path) == 0


def test_a_write_waits_for_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log, full = log_in(tmp_path, patience_s=60.0), [2]
    honest = os.posix_fallocate

    def sometimes(file: int, offset: int, size: int) -> None:
        if full[0]:
            full[0] -= 1
            raise OSError(errno.ENOSPC, "No space left on device")
        honest(file, offset, size)

    monkeypatch.setattr(os, "posix_fallocate", sometimes)
    monkeypatch.setattr("fleetlight.ps.journal.disk_full_retry._TRY_EVERY_S", 0.0)
    assert log.read(log.append(records(0, 12)).astype(np.int64))[:, 0].tolist() == [*range(12)]
    assert full == [0]


def test_a_full_disk_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = log_in(tmp_path)
    log.append(records(0, 3))

    def full(file: int, offset: int, size: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        with pytest.raises(RowFileError, match=r"table 'emb'.*No space left.*table_folder"):
            log.append(records(50, 9))
    assert log.append(records(3, 9)).tolist() == [*range(3, 12)]
    assert log.read(np.arange(12))[:, 0].tolist() == [*range(12)]


def test_a_file_that_ends_early_is_an_error(tmp_path: Path) -> None:
    log = log_in(tmp_path)
    log.append(records(0, 12))
    os.ftruncate(log._opened(), 12 * 7)
    with pytest.raises(RowFileError, match="it ends before byte 108"):
        log.read(np.array([8], np.int64))


def test_a_folder_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RowFileError, match=r"cannot be written in .*file/rows"):
        log_in(tmp_path / "file" / "rows").append(records(0, 1))


def test_positions_are_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_log, "_MAX_RECORDS", 10)
    log = log_in(tmp_path)
    log.append(records(0, 10))
    with pytest.raises(ConfigError, match="its file has 10 records, the most; use more servers"):
        log.append(records(0, 1))


def test_expected_records_are_announced_by_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    announced: list[tuple[int, int, int, int]] = []
    log = RowLog(tmp_path, "emb", 512)
    log.expect(np.array([3]))  # there is no file yet
    at = log.append(np.zeros((40, 512), np.float32))
    monkeypatch.setattr(os, "posix_fadvise", lambda *call: announced.append(call))
    log.expect(at[[30, 0, 1, 31, 7]].astype(np.int64))
    assert announced == [
        (log._file, page * 4096, 4096, os.POSIX_FADV_WILLNEED) for page in (0, 3, 15)
    ]


# Tables with few rows in memory, compared to the bit with tables in memory.


DIM = 3
OPTIONS: dict[str, dict[str, Any]] = {
    "sgd": {},
    "adagrad": {"eps": 1e-8},
    "rowwise_adagrad": {"eps": 1e-8},
    "adam": {"eps": 1e-8, "betas": (0.9, 0.99)},
}
EVERY: Ids = np.arange(120, dtype=np.int64)
ENTRIES = [None, EntryPlan("count", 2.0), EntryPlan("probability", 0.5), EntryPlan("show_click")]
batches = st.lists(st.sampled_from(EVERY.tolist()), max_size=60).map(
    lambda ids: np.array(ids, np.int64)
)


class Served:
    """The rows that a service has: those of a publication, and of the changes after it."""

    def __init__(self) -> None:
        self.by_id: dict[int, Floats] = {}

    def take(self, cut: TableCut, pieces: Iterable[tuple[Ids, Floats]], is_delta: bool) -> None:
        if not is_delta:
            self.by_id = {}
        for i in cut.removed.tolist():
            self.by_id.pop(i, None)
        for ids, rows in pieces:
            self.by_id.update(zip(ids.tolist(), rows.copy(), strict=True))

    def rows(self, ids: Ids, unknown: Floats) -> Floats:
        return np.array(
            [self.by_id.get(i, first) for i, first in zip(ids.tolist(), unknown, strict=True)]
        )


class Both(RuleBasedStateMachine):
    """Makes the same calls to both tables."""

    @initialize(
        name=st.sampled_from(sorted(OPTIONS)),
        entry=st.sampled_from(ENTRIES),
        dtype=st.sampled_from(["fp32", "bf16"]),
        geo=st.booleans(),
    )
    def begin(self, name: str, entry: EntryPlan | None, dtype: str, geo: bool) -> None:
        self.plain, self.tiered = (
            make(name, geo, entry=entry, dtype=dtype, memory=memory) for memory in (0, 1)
        )
        self.name, self.geo, self.entry, self.step = name, geo, entry, 0
        self.cuts: list[Any] = []
        self.publications: list[Any] = []
        self.served = Served(), Served()
        self.unknown = make(name, geo, dtype=dtype)
        self.folder = Path(tempfile.mkdtemp())

    def both(self, act: Any) -> tuple[Any, Any]:
        return act(self.plain), act(self.tiered)

    @rule(ids=batches, insert=st.booleans())
    def pull(self, ids: Ids, insert: bool) -> None:
        self.step += 1
        assert same(*self.both(lambda table: table.pull(ids, insert, self.step)))

    @rule(ids=batches)
    def push(self, ids: Ids) -> None:
        self.step += 1
        gradients, counts = numbers(self.step, len(ids), DIM), np.ones(len(ids), np.float32)
        counted = (counts, counts) if self.entry is not None and len(ids) % 2 else (None, None)
        options = {**LR, **OPTIONS[self.name]}
        self.both(lambda table: table.push(ids, gradients, options, self.step, *counted))

    @precondition(lambda self: self.geo)
    @rule(ids=st.sets(st.sampled_from(EVERY.tolist())))
    def exchange(self, ids: set[int]) -> None:
        self.step += 1
        some, added = np.array(sorted(ids), np.int64), numbers(self.step, len(ids), DIM)
        found = self.both(lambda t: t.exchange(some, added.copy(), wants=True, step=self.step))
        assert same(found[0][0], found[1][0])

    @rule(ids=batches)
    def fill(self, ids: Ids) -> None:
        self.both(lambda table: table.fill(ids, numbers(len(ids), len(ids), DIM)))

    @rule()
    def reset(self) -> None:
        self.both(lambda table: table.reset())

    @precondition(lambda self: self.entry is not None)
    @rule(unseen=st.integers(0, 2), score=st.sampled_from([0.0, 0.11]))
    def shrink(self, unseen: int, score: float) -> None:
        plain, tiered = self.both(lambda table: table.shrink(unseen, score, 0.5))
        assert plain == tiered

    @rule(ordered=st.booleans())
    def cut(self, ordered: bool) -> None:
        self.cuts = [*self.both(lambda table: table.cut(ordered=ordered))]

    @precondition(lambda self: self.cuts)
    @rule(loads=st.booleans())
    def save(self, loads: bool) -> None:
        """A cut that later calls have changed rows of."""
        self.step += 1
        plain, tiered = (f"{name}{self.step}" for name in ("plain", "tiered"))
        self.plain.save(self.cuts[0], 0, self.folder, plain)
        self.tiered.save(self.cuts[1], 0, self.folder, tiered)
        if self.cuts[0].starts is not None:
            files = [(self.folder / name).read_bytes() for name in (plain, tiered)]
            assert files[0] == files[1]
        if loads:
            for table, path in ((self.plain, tiered), (self.tiered, plain)):
                table.load([self.folder / path], None)
            self.publications = []
        self.cuts = []

    @rule(delta=st.booleans())
    def cut_publication(self, delta: bool) -> None:
        """Of the changes since the last one, or of all rows; one before it becomes none."""
        known = [table.changes().is_complete for table in (self.plain, self.tiered)]
        assert known[0] == known[1]
        self.is_delta = delta and known[0] and not self.publications
        self.publications = [*self.both(lambda table: table.cut_changes(whole=not self.is_delta))]
        self.expected = read(self.plain, EVERY)

    @precondition(lambda self: self.publications)
    @rule(reads=st.booleans())
    def publish(self, reads: bool) -> None:
        """A publication that later calls have changed rows of, or one that fails."""
        tables = self.plain, self.tiered
        for table, cut, served in zip(tables, self.publications, self.served, strict=True):
            pieces = list(table.published_pieces(cut)) if reads else []
            if reads:
                served.take(cut, pieces, self.is_delta)
                assert same(served.rows(EVERY, read(self.unknown, EVERY)), self.expected)
            table.settle_changes(published=reads)
        self.publications = []

    @invariant()
    def same_rows(self) -> None:
        assert len(self.plain) == len(self.tiered)
        assert same(*self.both(lambda table: table.pull(EVERY, insert=False)))

    def teardown(self) -> None:
        if not hasattr(self, "folder"):
            return
        files = [saved(table, self.folder / n) for n, table in enumerate_both(self)]
        assert by_id(files[:1]) == by_id(files[1:])


def enumerate_both(both: Both) -> list[tuple[str, Table]]:
    return [("last plain", both.plain), ("last tiered", both.tiered)]


TestBoth = Both.TestCase
TestBoth.settings = settings(deadline=None, max_examples=25, stateful_step_count=20)


def test_memory_is_a_limit_of_rows(tmp_path: Path) -> None:
    table = make(memory=40 * (4 * DIM + 13))
    table.fill(some_ids(1000), ones(len(some_ids(1000))))
    rows = table._rows
    assert isinstance(rows, TieredRowTable)
    assert len(rows._slots) == 40
    assert (read(table, some_ids(1000)) == 1).all()


def test_a_full_disk_fails_a_push_that_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fleetlight.ps.tables.tier.kinds.RowLog", without_patience)
    table, ids = make("adagrad", memory=1), np.arange(100)
    table.fill(ids, ones(100))
    done = 0

    def push_some() -> None:
        nonlocal done
        while done < 100:
            some = ids[done : done + 8]
            table.push(some, ones(len(some)), {**LR, "eps": 0.0}, 0)
            done += 8

    with monkeypatch.context() as patch:

        def full(file: int, data: Any, offset: int) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

        patch.setattr(os, "pwrite", full)
        with pytest.raises(RowFileError, match=r"table 'emb'.*: No space left on device; make"):
            push_some()
    push_some()
    assert (read(table, ids) == 0.5).all()


def without_patience(*about: Any) -> Any:
    from fleetlight.ps.tables.tier.row_log import RowLog

    return RowLog(*about, patience_s=0.0)


def test_a_delta_has_rows_of_the_file_and_the_ids_that_lost_theirs() -> None:
    served, unknown = Served(), read(make(), EVERY)
    table = make("adagrad", entry=EntryPlan("show_click"), memory=1)
    for whole, changed in ((True, EVERY), (False, EVERY[::3]), (False, EVERY[5:50])):
        counts = np.ones(len(changed), np.float32)
        table.push(changed, ones(len(changed)), {**LR, "eps": 1e-8}, 0, counts, counts)
        if not whole:
            # those that the last push did not have
            assert table.shrink(0, 1.0, 0.5)[0] > 0
        cut, expected = table.cut_changes(whole=whole), read(table, EVERY)
        # changes and removals after the cut are not in it
        table.push(EVERY[::2], ones(60), {**LR, "eps": 1e-8}, 1, np.ones(60, np.float32))
        table.shrink(0, 0.3, 1.0)
        served.take(cut, table.published_pieces(cut), not whole)
        assert same(served.rows(EVERY, unknown), expected)
        table.settle_changes(published=True)
