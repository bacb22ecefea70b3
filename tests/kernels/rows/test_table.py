# SPDX-License-Identifier: Apache-2.0
"""RowTable, compared with a twin that keeps rows in a dictionary."""

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from numpy.typing import NDArray
from tests.kernels.batches import id_batches, numbers, same

from fleetlight.errors import ConfigError
from fleetlight.kernels import RULES, Initializer, RowTable, first_values, rule_named
from fleetlight.kernels.rows import index as index_module
from fleetlight.kernels.rows import memory
from fleetlight.kernels.twin_table import TwinTable

UNIFORM = Initializer("uniform", -0.1, 0.1)
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
        name=st.sampled_from(sorted(RULES)),
        kind=st.sampled_from(["uniform", "normal"]),
        meta=st.integers(0, 4),
    )
    def begin(self, dim: int, name: str, kind: str, meta: int) -> None:
        learn = rule_named(name, OPTIONS)
        how = Initializer(kind, 0.5, 1.0)  # type: ignore[arg-type]
        self.table = RowTable(dim, learn, 11, how, meta)
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
    table, twin = RowTable(3, "add", 1, UNIFORM, 1), TwinTable(3, "add", 1, UNIFORM, 1)
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


def _assert_same_content(table: RowTable, twin: TwinTable) -> None:
    inside = twin.numbers
    assert (table.numbers == inside).all()
    assert same(table.ids_of(inside), twin.ids_of(inside))
    assert same(table.rows[inside], twin.rows[inside])


def test_first_values_do_not_depend_on_insertion_order() -> None:
    ids = np.random.default_rng(0).permutation(200_000) * 7919 - 10**9
    table = RowTable(2, "adagrad", 9, UNIFORM)
    for batch in np.array_split(ids, 31):
        assert same(table.pull(batch), first_values(batch, 2, 9, UNIFORM))
    assert len(table) == len(ids)
    assert (table.ids_of(table.find(ids)) == ids).all()


def test_a_batch_larger_than_the_table() -> None:
    table = RowTable(1, "sgd", 0, UNIFORM)
    ids = np.arange(100_000)
    table.insert(ids[:10])
    assert same(table.pull(ids), first_values(ids, 1, 0, UNIFORM))


def test_capacity_hint_avoids_growth() -> None:
    table = RowTable(1, "sgd", capacity_hint=50_000)
    table.insert(np.arange(50_000))
    assert not table.growing
    assert table._index.nbytes == 16 * 131_072


def test_growth_does_not_move_rows() -> None:
    table = RowTable(2, "sgd", 0, UNIFORM)
    table.insert([1])
    view = table.rows
    table.insert(np.arange(300_000))
    view[0, 0] = 5
    assert table.pull([1])[0, 0] == 5


def test_pull_without_insert_does_not_change_the_table() -> None:
    table = RowTable(4, "adam", 3, UNIFORM)
    assert same(table.pull([1, 2, 1], insert=False), first_values([1, 2, 1], 4, 3, UNIFORM))
    assert len(table) == 0
    assert table.find([1]).tolist() == [-1]


def test_push_sums_gradients_before_squaring() -> None:
    table = RowTable(1, "adagrad")
    table.push([4, 4], [[1], [2]], table.rule.hyper({"lr": 1.0}))
    assert table.rows.tolist() == [[-1.0, 9.0]]


def test_push_of_distinct_ids_gives_the_same_rows() -> None:
    tables = [RowTable(3, "adagrad", 0, UNIFORM) for _ in range(2)]
    ids, grads = np.arange(50), numbers(0, 50, 3)
    for table, distinct in zip(tables, (True, False), strict=True):
        table.push(ids, grads, table.rule.hyper({"lr": 0.1}), distinct=distinct)
    assert same(tables[0].rows, tables[1].rows)


def test_load_keeps_the_last_of_repeated_rows() -> None:
    table = RowTable(1, "sgd", meta_width=1)
    table.load([3, 3], [[1, 2], [3, 4]])
    assert table.rows.tolist() == [[3, 4]]


def test_removed_id_restarts_in_a_clean_row() -> None:
    table = RowTable(1, "adagrad", 0, UNIFORM, meta_width=1)
    table.push([8], [[5]], table.rule.hyper({"lr": 1.0}))
    table.rows[:, 2] = 7
    assert table.remove(table.find([8])) == 1
    assert len(table) == 0
    table.insert([8])
    assert table.rows.tolist() == [[first_values([8], 1, 0, UNIFORM).item(), 0, 0]]


def test_removed_rows_have_no_id() -> None:
    table = RowTable(1, "sgd")
    table.insert([1, 2])
    table.remove([0])
    with pytest.raises(ConfigError, match="row 0 of 2 holds no id"):
        table.ids_of([1, 0])


def test_invalid_arguments_are_refused() -> None:
    table = RowTable(2, "sgd")
    with pytest.raises(ConfigError, match=r"gradients have the shape \[1, 3\], expected \[1, 2\]"):
        table.push([1], np.ones((1, 3)), table.rule.hyper({"lr": 1.0}))
    with pytest.raises(ConfigError, match=r"expected 5: pass the result of rule\.hyper"):
        table.push([1], np.ones((1, 2)), np.ones(1))
    with pytest.raises(ConfigError, match="expected dim >= 1"):
        RowTable(0, "sgd")
    assert len(table) == 0


@settings(deadline=None, max_examples=20)
@given(id_batches)
def test_nbytes_counts_used_rows_only(ids: Batch) -> None:
    table = RowTable(16, "adagrad", meta_width=4)
    empty = table.nbytes
    table.insert(ids)
    assert table.nbytes == empty + len(table) * (16 + 16 + 4 + 1) * 4


def test_bytes_per_row_at_ten_million_ids() -> None:
    # calculated: the index fills 0.35 to 0.7 of its slots
    assert index_module.Index(10_000_000).nbytes / 10_000_000 + 4 + 128 < 160
