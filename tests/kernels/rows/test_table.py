# SPDX-License-Identifier: Apache-2.0
"""RowTable, compared with a twin that keeps rows in a dictionary."""

import errno
import logging
import mmap
import os
import resource
import subprocess
import sys
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from numpy.typing import NDArray
from tests.kernels.batches import id_batches, numbers, same
from tests.kernels.batches import numbers as random

from fleetlight import kernels
from fleetlight.errors import ConfigError
from fleetlight.kernels.arrays import Ids, Matrix
from fleetlight.kernels.rows import copies, memory, slab
from fleetlight.kernels.rows import index as index_module
from fleetlight.kernels.rows.first_values import KINDS
from fleetlight.kernels.rows.index import Index
from fleetlight.kernels.rows.slab import TOP, Slab
from fleetlight.kernels.twin_table import TwinTable

UNIFORM = kernels.Initializer("uniform", -0.1, 0.1)
OPTIONS = {
    "lr": 0.1,
    "initial_accumulator_value": 0.1,
    "weight_decay": 0.01,
    "momentum": 0.9,
    "l1": 0.5,
    "l2": 0.1,
}
Batch = NDArray[np.int64]


class Both(RuleBasedStateMachine):
    """Makes the same calls to the table and to its twin."""

    @initialize(
        dim=st.integers(1, 5),
        name=st.sampled_from(sorted(kernels.RULES)),
        kind=st.sampled_from(["uniform", "normal"]),
        meta=st.integers(0, 4),
    )
    def begin(self, dim: int, name: str, kind: str, meta: int) -> None:
        learn = kernels.rule_named(name, OPTIONS)
        how = kernels.Initializer(kind, 0.5, 1.0)  # type: ignore[arg-type]
        self.table = kernels.RowTable(dim, learn, 11, how, meta)
        self.twin = TwinTable(dim, learn, 11, how, meta)
        self.step = 0

    @rule(ids=id_batches, insert=st.booleans())
    def pull(self, ids: Batch, insert: bool) -> None:
        ours, twin = self.table.pull(ids, insert=insert), self.twin.pull(ids, insert=insert)
        np.testing.assert_allclose(ours, twin, rtol=1e-4, atol=1e-5)

    @rule(ids=id_batches)
    def push(self, ids: Batch) -> None:
        self.step += 1
        grads = numbers(self.step, len(ids), self.table.dim)
        hyper = self.table.rule.hyper(OPTIONS, self.step)
        self.table.push(ids, grads, hyper)
        self.twin.push(ids, grads, hyper)

    @rule(ids=id_batches)
    def find(self, ids: Batch) -> None:
        assert (self.table.find(ids) == self.twin.find(ids)).all()

    @precondition(lambda self: len(self.twin))
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        top = len(self.twin.rows)
        gone = data.draw(st.lists(st.integers(-1, top), max_size=top))
        assert self.table.remove(gone) == self.twin.remove(np.array(gone, np.int64))

    @rule(ids=id_batches)
    def load(self, ids: Batch) -> None:
        rows = np.abs(numbers(7, len(ids), self.table.width))
        self.table.load(ids, rows)
        self.twin.load(ids, rows)

    @invariant()
    def same_ids_in_the_same_rows(self) -> None:
        assert len(self.table) == len(self.twin)
        assert (self.table.numbers == self.twin.numbers).all()
        assert sorted(self.table.freed) == sorted(self.twin.freed)
        inside = self.table.numbers
        assert same(self.table.ids_of(inside), self.twin.ids_of(inside))
        ours, twin = self.table.rows[inside], self.twin.rows[inside]
        np.testing.assert_allclose(ours, twin, rtol=1e-4, atol=1e-5)


TestBoth = Both.TestCase
TestBoth.settings = settings(deadline=None, max_examples=30, stateful_step_count=25)


@pytest.fixture
def cramped(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An index that starts tiny and moves slowly, in a slab that growth copies."""
    monkeypatch.setattr(index_module, "_FIRST_SLOTS", 4)
    monkeypatch.setattr(index_module, "_MOVES", 1)
    monkeypatch.setattr(memory, "reserve", lambda count, dtype: None)
    monkeypatch.setattr("fleetlight.kernels.rows.slab._FIRST_ROWS", 3)
    return


@pytest.mark.usefixtures("cramped")
def test_table_equals_the_twin_during_growth() -> None:
    rng = np.random.default_rng(5)
    table, twin = kernels.RowTable(3, "add", 1, UNIFORM, 1), TwinTable(3, "add", 1, UNIFORM, 1)
    growing = 0
    for step in range(1200):
        ids = rng.integers(0, 30 + 2 * step, rng.integers(0, 5))
        hyper = table.rule.hyper({})
        match step % 4:
            case 0 | 1:
                assert same(table.pull(ids), twin.pull(ids))
            case 2:
                grads = numbers(step, len(ids), 3)
                table.push(ids, grads, hyper)
                twin.push(ids, grads, hyper)
            case 3:
                gone = table.find(ids[:1])
                assert table.remove(gone) == twin.remove(gone)
        growing += table.growing
        assert (table.find(ids) == twin.find(ids)).all()
        if step % 50 == 0:
            _assert_same_content(table, twin)
    _assert_same_content(table, twin)
    assert growing > 80
    assert table._slab.capacity < 3000


def _assert_same_content(table: kernels.RowTable, twin: TwinTable) -> None:
    inside = twin.numbers
    assert (table.numbers == inside).all()
    assert same(table.ids_of(inside), twin.ids_of(inside))
    assert same(table.rows[inside], twin.rows[inside])


def test_first_values_do_not_depend_on_insertion_order() -> None:
    ids = np.random.default_rng(0).permutation(200_000) * 7919 - 10**9
    table = kernels.RowTable(2, "adagrad", 9, UNIFORM)
    for batch in np.array_split(ids, 31):
        assert same(table.pull(batch), kernels.first_values(batch, 2, 9, UNIFORM))
    assert len(table) == len(ids)
    assert (table.ids_of(table.find(ids)) == ids).all()


def test_a_batch_larger_than_the_table() -> None:
    table = kernels.RowTable(1, "sgd", 0, UNIFORM)
    ids = np.arange(100_000)
    table.insert(ids[:10])
    assert same(table.pull(ids), kernels.first_values(ids, 1, 0, UNIFORM))


def test_capacity_hint_avoids_growth() -> None:
    table = kernels.RowTable(1, "sgd", capacity_hint=50_000)
    table.insert(np.arange(50_000))
    assert not table.growing
    assert table._index.nbytes == 16 * 131_072


def test_growth_does_not_move_rows() -> None:
    table = kernels.RowTable(2, "sgd", 0, UNIFORM)
    table.insert([1])
    view = table.rows
    table.insert(np.arange(300_000))
    view[0, 0] = 5
    assert table.pull([1])[0, 0] == 5


def test_pull_without_insert_does_not_change_the_table() -> None:
    table = kernels.RowTable(4, "adam", 3, UNIFORM)
    assert same(table.pull([1, 2, 1], insert=False), kernels.first_values([1, 2, 1], 4, 3, UNIFORM))
    assert len(table) == 0
    assert table.find([1]).tolist() == [-1]


def test_push_sums_gradients_before_squaring() -> None:
    table = kernels.RowTable(1, "adagrad")
    table.push([4, 4], [[1], [2]], table.rule.hyper({"lr": 1.0}))
    assert table.rows.tolist() == [[-1.0, 9.0]]


def test_push_of_distinct_ids_gives_the_same_rows() -> None:
    tables = [kernels.RowTable(3, "adagrad", 0, UNIFORM) for _ in range(2)]
    ids, grads = np.arange(50), numbers(0, 50, 3)
    for table, distinct in zip(tables, (True, False), strict=True):
        table.push(ids, grads, table.rule.hyper({"lr": 0.1}), distinct=distinct)
    assert same(tables[0].rows, tables[1].rows)


def test_load_keeps_the_last_of_repeated_rows() -> None:
    table = kernels.RowTable(1, "sgd", meta_width=1)
    table.load([3, 3], [[1, 2], [3, 4]])
    assert table.rows.tolist() == [[3, 4]]


def test_removed_id_restarts_in_a_clean_row() -> None:
    table = kernels.RowTable(1, "adagrad", 0, UNIFORM, meta_width=1)
    table.push([8], [[5]], table.rule.hyper({"lr": 1.0}))
    table.rows[:, 2] = 7
    assert table.remove(table.find([8])) == 1
    assert len(table) == 0
    table.insert([8])
    assert table.rows.tolist() == [[kernels.first_values([8], 1, 0, UNIFORM).item(), 0, 0]]


def test_removed_rows_have_no_id() -> None:
    table = kernels.RowTable(1, "sgd")
    table.insert([1, 2])
    table.remove([0])
    with pytest.raises(ConfigError, match="row 0 of 2 holds no id"):
        table.ids_of([1, 0])


def test_invalid_arguments_are_refused() -> None:
    table = kernels.RowTable(2, "sgd")
    with pytest.raises(ConfigError, match=r"gradients have the shape \[1, 3\], expected \[1, 2\]"):
        table.push([1], np.ones((1, 3)), table.rule.hyper({"lr": 1.0}))
    with pytest.raises(ConfigError, match=r"expected 5: pass the result of rule\.hyper"):
        table.push([1], np.ones((1, 2)), np.ones(1))
    with pytest.raises(ConfigError, match="expected dim >= 1"):
        kernels.RowTable(0, "sgd")
    assert len(table) == 0


@settings(deadline=None, max_examples=20)
@given(id_batches)
def test_nbytes_counts_used_rows_only(ids: Batch) -> None:
    table = kernels.RowTable(16, "adagrad", meta_width=4)
    empty = table.nbytes
    table.insert(ids)
    assert table.nbytes == empty + len(table) * (16 + 16 + 4 + 1) * 4


def test_bytes_per_row_at_ten_million_ids() -> None:
    # calculated: the index fills 0.35 to 0.7 of its slots
    assert index_module.Index(10_000_000).nbytes / 10_000_000 + 4 + 128 < 160


# -- the index during growth: its contents, and the share of the work that each operation does ----


def growing_table(monkeypatch: pytest.MonkeyPatch) -> kernels.RowTable:
    """A table of 800 rows whose index starts to grow."""
    monkeypatch.setattr(index_module, "_MOVES", 0)
    monkeypatch.setattr(index_module, "_LOOKED_FOR", 10**9)
    table = kernels.RowTable(1, "sgd")
    table.insert(np.arange(800))
    assert table.growing
    assert len(table._index.old) == 2 * 1024
    return table


def test_each_operation_moves_a_bounded_number_of_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    table = growing_table(monkeypatch)
    monkeypatch.setattr(index_module, "_MOVES", 10)
    monkeypatch.setattr(index_module, "_LOOKED_FOR", 4)
    moved = []
    while table.growing:
        moved.append(table._index.moved)
        table.pull(np.arange(20))
    assert np.diff(moved).tolist() == [8 * (10 + 20 // 4)] * (len(moved) - 1)
    assert (table.find(np.arange(800)) == np.arange(800)).all()


def test_growth_finishes_before_the_next_one_starts() -> None:
    index = Index(50_000)
    index.grow()
    lines = len(index.old) // 8
    index.inserted(lines // 2, 0)
    assert index.moved == len(index.old) // 2
    index.inserted(lines // 2, 0)
    assert not len(index.old)
    # a growth adds as many ids as the old index could hold, which is more than it has lines
    assert lines < index.limit - index.limit // 2


def test_rows_removed_and_inserted_during_growth(monkeypatch: pytest.MonkeyPatch) -> None:
    table = growing_table(monkeypatch)
    table._index._move(100)
    assert table.remove(np.arange(0, 800, 2)) == 400
    assert table.remove(np.arange(0, 800, 2)) == 0
    assert (table.find(np.arange(0, 800, 2)) == -1).all()
    reused = table.insert([0, 2, 4])
    assert sorted(reused) == [794, 796, 798]
    table._index._move(10_000)
    assert (table.find([0, 2, 4]) == reused).all()
    assert (table.find(np.arange(1, 800, 2)) == np.arange(1, 800, 2)).all()
    assert len(table) == 403 == len(table.ids_of(table.numbers))


def test_next_index_is_allocated_before_it_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    index = Index(100_000)
    asked = []
    zeros = index_module.memory.zeros
    monkeypatch.setattr(
        index_module.memory, "zeros", lambda n, dtype: asked.append(n) or zeros(n, dtype)
    )
    before = index.nbytes
    index.inserted(1000, int(index.limit * 0.89))
    assert index.nbytes == before
    first = int(index.limit * 0.9) + 1
    index.inserted(100, first)
    assert index.nbytes == before + 100 * 64 * 8
    for live in range(first, index.limit, 100):
        index.inserted(100, live)
    assert index.nbytes == 3 * before
    slots = len(index.slots)
    index.grow()
    assert len(index.slots) == 2 * slots
    assert asked == [2 * slots]
    assert index.nbytes == 3 * before


def test_index_is_sized_by_the_hint() -> None:
    assert Index().limit == 716
    assert 10_000_000 <= Index(10_000_000).limit < 12_000_000


def test_inserts_prepare_the_next_index() -> None:
    table = kernels.RowTable(1, "sgd")
    ready = []
    for start in range(0, 714, 7):
        table.insert(np.arange(start, start + 7))
        ready.append(table._index.nbytes)
    assert ready[0] < ready[-1] == 3 * ready[0]


# -- reserved memory occupies only the touched pages ----------------------------------------------


def resident() -> int:
    """The resident bytes of this process."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def test_reserved_memory_occupies_only_touched_pages() -> None:
    before = resident()
    array = memory.reserve(2**34, np.float32)
    assert array is not None
    assert len(array) == 2**34
    array[: 2**20] = 1
    array[2**33] = 1
    assert array[2**33 - 1] == 0
    assert resident() - before < 4 * 2**20 + 3 * memory.HUGE_PAGES_FROM + 2**20


def test_reserve_returns_none_if_it_fails() -> None:
    assert memory.reserve(2**60, np.float32) is None


def test_populate_makes_pages_resident_and_keeps_their_contents() -> None:
    array = memory.reserve(2**26, np.uint8)
    assert array is not None
    # not at a page boundary
    array[1000] = 7
    before = resident()
    memory.populate(array[1000 : 2**25])
    assert resident() - before > 2**25 - 2 * memory.HUGE_PAGES_FROM - 2**20
    assert array[1000] == 7
    assert array[1001 : 2**25].max() == 0


def test_zeros_are_writable_at_any_size() -> None:
    for count in (0, 1, 1000, 2**20):
        array = memory.zeros(count, np.int64)
        assert len(array) == count
        assert not array.any()
        array[:] = 1


@pytest.mark.slow
def test_tables_work_under_an_address_space_limit() -> None:
    program = """
import resource
import numpy as np
from fleetlight.kernels import RowTable
table = RowTable(4, "adagrad")
table.insert([1])  # compile first, that needs more
resource.setrlimit(resource.RLIMIT_AS, (6 << 30, 6 << 30))
table = RowTable(4, "adagrad")
assert table._slab.capacity == 1024, table._slab.capacity
numbers = table.insert(np.arange(5000))
assert (table.find(np.arange(5000)) == numbers).all()
assert table.ids_of(numbers).tolist() == list(range(5000))
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=100)


def flags_at(address: int) -> set[str]:
    """The kernel's flags of the mapping that contains an address."""
    inside = False
    with open("/proc/self/smaps") as file:
        for line in file:
            first = line.split()[0]
            if "-" in first and not first.endswith(":"):
                low, high = (int(number, 16) for number in first.split("-"))
                inside = low <= address < high
            elif inside and first == "VmFlags:":
                return set(line.split()[1:])
    return set()


@pytest.mark.skipif(
    not os.path.exists("/sys/kernel/mm/transparent_hugepage"), reason="a kernel without huge pages"
)
def test_only_large_memory_requests_huge_pages() -> None:
    count = 8 * memory.HUGE_PAGES_FROM
    reserved = memory.reserve(count, np.uint8)
    assert reserved is not None
    for array in (memory.zeros(count, np.uint8), reserved[2 * memory.HUGE_PAGES_FROM :]):
        assert "hg" in flags_at(array.ctypes.data)
    assert "hg" not in flags_at(reserved.ctypes.data)


class Refusing(mmap.mmap):
    """Memory of a kernel without huge pages."""

    def madvise(self, *_: int) -> None:
        raise OSError(errno.EINVAL, "Invalid argument")


@pytest.mark.parametrize("kind", ["another system", "refused"])
def test_tables_work_without_huge_pages(
    kind: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if kind == "refused":
        monkeypatch.setattr(mmap, "mmap", Refusing)
    else:
        monkeypatch.delattr(mmap, "MADV_HUGEPAGE", raising=False)
    caplog.set_level(logging.DEBUG, memory.__name__)
    ids = np.arange(200_000)
    table = kernels.RowTable(8, "sgd", capacity_hint=len(ids))
    numbers = table.insert(ids)
    assert np.array_equal(table.find(ids), numbers)
    # the rows, the part of an id's hash in each, and the index
    assert len(caplog.records) == 3
    assert all("huge pages" in record.getMessage() for record in caplog.records)
    assert {record.levelno for record in caplog.records} == {logging.DEBUG}


def test_huge_pages_are_not_mentioned_where_they_work(caplog: pytest.LogCaptureFixture) -> None:
    if not os.path.exists("/sys/kernel/mm/transparent_hugepage"):
        pytest.skip("a kernel without huge pages")
    caplog.set_level(logging.DEBUG, memory.__name__)
    assert memory.reserve(8 * memory.HUGE_PAGES_FROM, np.uint8) is not None
    assert not caplog.records


# -- growth of slabs with and without reserved memory ---------------------------------------------


@pytest.fixture
def unreserved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "reserve", lambda count, dtype: None)


@pytest.mark.usefixtures("unreserved")
def test_growth_keeps_rows_and_homes() -> None:
    rows = Slab(3)
    rows.counters[TOP] = rows.capacity
    rows.rows[:] = 7
    rows.homes[:] = 9
    before = rows.capacity
    rows.grow()
    assert rows.capacity == before * 3 // 2
    assert (rows.rows == 7).all()
    assert len(rows.rows) == before
    assert (rows.homes[:before] == 9).all()
    assert not rows.flat[before * 3 :].any()


@pytest.mark.usefixtures("unreserved")
def test_a_full_table_refuses_to_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slab, "MAX_ROWS", 1024)
    with pytest.raises(ConfigError, match="a table of 1024 rows is full: use more servers"):
        Slab(1).grow()


def test_reserved_slab_has_capacity_for_the_whole_memory() -> None:
    rows = Slab(32)
    assert rows.capacity * 128 >= memory.worth_reserving() - 128
    assert rows.nbytes == 0


# -- local copies of the servers' rows, compared with the twin in NumPy ---------------------------

DIM, STATE, COUNT = 3, 2, 8
positions = st.lists(
    st.integers(-1, COUNT - 1), max_size=20, unique_by=lambda n: n if n >= 0 else object()
)
windows = st.lists(st.sampled_from([-1, 0, 1, 2, 3]), min_size=COUNT, max_size=COUNT)


def made(last: list[int]) -> Matrix:
    rows = random(0, COUNT, DIM + STATE + DIM + 1)
    rows[:, -1] = last
    return rows


def ids(found: list[int]) -> Ids:
    return np.array(found, np.int64)


@settings(deadline=None)
@given(positions, windows, st.integers(1, 3))
def test_read_equals_the_twin(found: list[int], last: list[int], oldest: int) -> None:
    rows = made(last)
    out, expected = np.zeros((2, len(found), DIM), np.float32)
    stale = copies.read(rows, ids(found), oldest, out)
    assert same(stale, kernels.twin_table.read_copies(rows, ids(found), oldest, expected))
    assert same(out, expected)
    assert same(rows, made(last))


@settings(deadline=None)
@given(positions, windows)
def test_mark_equals_the_twin(found: list[int], last: list[int]) -> None:
    mine, theirs = made(last), made(last)
    known = ids([number for number in found if number >= 0])
    assert same(copies.mark(mine, known, 3), kernels.twin_table.mark_copies(theirs, known, 3))
    assert same(mine, theirs)
    assert not len(copies.mark(mine, known, 3))


@settings(deadline=None)
@given(positions, windows, st.integers(1, 3))
def test_visit_reads_and_marks(found: list[int], last: list[int], oldest: int) -> None:
    mine, theirs = made(last), made(last)
    out, expected = np.zeros((2, len(found), DIM), np.float32)
    stale, fresh = copies.visit(mine, ids(found), oldest, 3, out)
    assert same(stale, kernels.twin_table.read_copies(theirs, ids(found), oldest, expected))
    assert same(out, expected)
    assert same(fresh, kernels.twin_table.mark_copies(theirs, np.delete(ids(found), stale), 3))
    assert same(mine, theirs)


@settings(deadline=None)
@given(positions, windows)
def test_renew_equals_the_twin(found: list[int], last: list[int]) -> None:
    mine, theirs = made(last), made(last)
    arrived = random(1, len(found), DIM)
    copies.renew(mine, ids(found), arrived)
    kernels.twin_table.renew_copies(theirs, ids(found), arrived)
    assert same(mine, theirs)


@settings(deadline=None)
@given(positions, windows, st.integers(1, 3))
def test_share_equals_the_twin(found: list[int], last: list[int], among: int) -> None:
    mine, theirs = made(last), made(last)
    known = ids([number for number in found if number >= 0])
    sent = copies.share(mine, known, among, DIM)
    assert same(sent, kernels.twin_table.share_copies(theirs, known, among, DIM))
    assert same(mine, theirs)


def test_renew_keeps_unsent_local_progress() -> None:
    rows = np.zeros((1, DIM + DIM + 1), np.float32)
    row = ids([0])
    copies.renew(rows, row, np.full((1, DIM), 5, np.float32))
    copies.mark(rows, row, 1)
    rows[0, :DIM] += 2
    copies.renew(rows, row, np.full((1, DIM), 9, np.float32))
    assert rows[0].tolist() == [11, 11, 11, 9, 9, 9, 1]
    assert copies.share(rows, row, 2, DIM).tolist() == [[1, 1, 1]]
    assert rows[0].tolist() == [11, 11, 11, 10, 10, 10, 1]


# -- first values equal the twin bit for bit and have the requested distribution ------------------

initializers = st.builds(
    kernels.Initializer, st.sampled_from(KINDS), st.floats(-1e3, 1e3), st.floats(-1e3, 1e3)
)


@settings(deadline=None)
@given(id_batches, st.integers(1, 33), st.integers(-(2**70), 2**70), initializers)
def test_first_values_equal_the_twin_bit_for_bit(
    ids: NDArray[np.int64], dim: int, seed: int, initializer: kernels.Initializer
) -> None:
    ours = kernels.first_values(ids, dim, seed, initializer)
    assert same(ours, kernels.twin_table.first_values(ids, dim, seed, initializer))


def test_first_values_never_change_between_releases() -> None:
    # a resumed job must give new rows the same first values
    uniform = kernels.first_values([7, -7], 2, 42, kernels.Initializer("uniform", -0.5, 0.5))
    normal = kernels.first_values([7, -7], 2, 42, kernels.Initializer("normal", 0.0, 0.01))
    assert [value.hex() for value in uniform.ravel().tolist()] == [
        "-0x1.64814c0000000p-2",
        "-0x1.beee400000000p-2",
        "-0x1.6381700000000p-2",
        "-0x1.04e1400000000p-5",
    ]
    assert [value.hex() for value in normal.ravel().tolist()] == [
        "0x1.03ae140000000p-11",
        "-0x1.6f0a3e0000000p-12",
        "0x1.5a999a0000000p-8",
        "0x1.01099a0000000p-6",
    ]


@pytest.mark.parametrize(
    ("initializer", "mean", "deviation"),
    [
        (kernels.Initializer("uniform", -1.0, 3.0), 1.0, 4 / 12**0.5),
        (kernels.Initializer("normal", 2.0, 0.5), 2.0, 0.5),
    ],
    ids=["uniform", "normal"],
)
def test_mean_and_deviation_match_the_initializer(
    initializer: kernels.Initializer, mean: float, deviation: float
) -> None:
    values = kernels.first_values(np.arange(50_000), 8, 1, initializer).astype(np.float64)
    assert values.mean() == pytest.approx(mean, abs=0.01)
    assert values.std() == pytest.approx(deviation, rel=0.01)
    # values of adjacent ids or columns are uncorrelated
    assert abs(np.corrcoef(values.T) - np.eye(8)).max() < 0.02
    assert abs(np.corrcoef(values[:-1, 0], values[1:, 0])[0, 1]) < 0.02


def test_normal_values_have_tails() -> None:
    values = kernels.first_values(np.arange(100_000), 4, 1, kernels.Initializer("normal", 0.0, 1.0))
    assert np.mean(np.abs(values) > 2) == pytest.approx(0.0455, abs=0.002)
    assert np.abs(values).max() > 4


def test_values_differ_between_seeds_ids_and_columns() -> None:
    uniform = kernels.Initializer("uniform", 0.0, 1.0)
    values = [kernels.first_values(np.arange(1000), 4, seed, uniform) for seed in (0, 1, 2)]
    assert len(np.unique(np.stack(values))) > 11_990


def test_table_seed_depends_on_job_seed_and_name() -> None:
    assert kernels.table_seed(0, "user") == 5312784502436322170
    assert len({kernels.table_seed(j, n) for j in range(10) for n in ("user", "item")}) == 20


def test_invalid_initializers_are_refused() -> None:
    with pytest.raises(ConfigError, match="did you mean 'uniform'"):
        kernels.Initializer("unifrom")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="expected numbers"):
        kernels.Initializer("normal", 0.0, float("nan"))
