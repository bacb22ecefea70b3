# SPDX-License-Identifier: Apache-2.0
"""Tables with weights in bfloat16, compared with those in float32."""

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.kernels.batches import numbers, same

from fleetlight.kernels import (
    RULES,
    Initializer,
    NarrowRowTable,
    RowTable,
    from_bfloat16,
    rule_named,
    to_bfloat16,
)
from fleetlight.kernels.rows import layered_rows
from fleetlight.kernels.rows.layered_rows import KNOWN, REMOVED, USED

OPTIONS: dict[str, Any] = {
    "lr": 0.01,
    "momentum": 0.9,
    "betas": (0.9, 0.99),
    "eps": 1e-8,
    "lr_decay": 0.0,
    "weight_decay": 0.0,
    "initial_accumulator_value": 0.1,
    "beta": 1.0,
}
IDS = np.arange(-20, 30, dtype=np.int64)
UNIFORM = Initializer("uniform", -1.0, 1.0)


def rounded(values: Any) -> NDArray[np.float32]:
    return from_bfloat16(to_bfloat16(np.asarray(values, np.float32)))


def pair(rule: str, dim: int) -> tuple[RowTable, NarrowRowTable]:
    """A table in float32 and one in bfloat16, with the same rows."""
    how = rule_named(rule, OPTIONS)
    exact, narrow = RowTable(dim, how, 7, UNIFORM), NarrowRowTable(dim, how, 7, UNIFORM)
    narrow.insert(IDS)
    exact.load(IDS, narrow.whole(narrow.rows)[narrow.find(IDS)])
    return exact, narrow


def test_first_values_are_those_of_float32_rounded() -> None:
    exact, narrow = RowTable(5, "sgd", 7, UNIFORM), NarrowRowTable(5, "sgd", 7, UNIFORM)
    unknown = narrow.pull(IDS, insert=False)
    assert len(narrow) == 0
    np.testing.assert_array_equal(unknown, rounded(exact.pull(IDS)))
    np.testing.assert_array_equal(narrow.pull(IDS), unknown)
    np.testing.assert_array_equal(narrow.pull(IDS[::-1], insert=False), unknown[::-1])


@pytest.mark.sampled(6)
@pytest.mark.slow
@pytest.mark.parametrize("dim", [5, 1, 4])
@pytest.mark.parametrize("rule", sorted(RULES))
def test_an_update_equals_that_in_float32_up_to_rounding(rule: str, dim: int) -> None:
    exact, narrow = pair(rule, dim)
    hyper, grads = exact.rule.hyper(OPTIONS, 1), numbers(3, len(IDS), dim)
    for table in (exact, narrow):
        table.push(IDS, grads, hyper, step=1)
    expected = exact.pull(IDS)
    error = np.abs(narrow.pull(IDS) - expected)
    assert (error <= np.abs(expected) * 2.0**-7).all()
    assert error.max() > 0
    stored = narrow.whole(narrow.rows)[narrow.find(IDS)]
    np.testing.assert_array_equal(stored[:, dim:], exact.rows[exact.find(IDS), dim:])


def test_many_small_updates_are_not_lost() -> None:
    """Each is a hundredth of the distance between two values: rounded to the nearest, all are."""
    narrow = NarrowRowTable(8, "sgd", 3, Initializer("constant", 1.0))
    ids = np.arange(200, dtype=np.int64)
    hyper = narrow.rule.hyper({"lr": 1.0})
    step_size = np.float32(2.0**-7 / 100)
    grads = np.full((len(ids), 8), step_size, np.float32)
    for step in range(300):
        narrow.push(ids, grads, hyper, step=step)
    rows = narrow.pull(ids)
    # a step to the next value has the probability 1/50 below 1, where values are closer
    assert abs(float(1 - rows.mean(dtype=np.float64)) / (300 * step_size) - 1) < 0.02
    assert len(np.unique(rows)) > 3


def test_equal_pushes_round_equally_and_others_differ() -> None:
    def after(step: int, ids: Any = IDS) -> NDArray[np.float32]:
        table = NarrowRowTable(4, "sgd", 7, UNIFORM)
        # another order of insertion gives rows other numbers
        table.insert(ids)
        table.push(IDS, numbers(1, len(IDS), 4), table.rule.hyper({"lr": 0.01}), step=step)
        return table.pull(IDS)

    np.testing.assert_array_equal(after(5), after(5, IDS[::-1].copy()))
    assert (after(5) != after(6)).any()


@pytest.mark.parametrize("dim", [1, 2, 7])
def test_loaded_rows_have_their_state_and_metadata(dim: int) -> None:
    table = NarrowRowTable(dim, "adam", meta_width=3)
    whole = numbers(0, len(IDS), 3 * dim + 3)
    table.load(IDS, whole)
    stored = table.whole(table.rows)[table.find(IDS)]
    assert table.whole_width == whole.shape[1]
    np.testing.assert_array_equal(stored[:, dim:], whole[:, dim:])
    np.testing.assert_array_equal(stored[:, :dim], rounded(whole[:, :dim]))
    np.testing.assert_array_equal(table.rows[table.find(IDS), -3:], whole[:, -3:])
    weights = numbers(1, len(IDS), dim)
    table.set_weights(table.find(IDS), weights)
    np.testing.assert_array_equal(table.pull(IDS), rounded(weights))


def test_values_stay_finite_and_nan_stays_nan() -> None:
    table = NarrowRowTable(4, "add")
    largest = np.float32(3.3895314e38)
    table.push([1], np.array([[largest, -largest, np.nan, np.inf]], np.float32), np.zeros(5))
    more = np.array([[1e36, -1e36, 0, 0]], np.float32)
    for step in range(20):
        table.push([1], more, np.zeros(5), step=step)
    row = table.pull([1])[0]
    assert row[:2].tolist() == [largest, -largest]
    assert np.isnan(row[2])
    assert np.isinf(row[3])


def test_weights_take_half_the_memory() -> None:
    exact, narrow = RowTable(16, "sgd"), NarrowRowTable(16, "sgd")
    assert (exact.width, narrow.width) == (16, 8)
    assert NarrowRowTable(16, "adagrad", meta_width=2).width == 8 + 16 + 2


def test_learning_by_number_equals_learning_by_id() -> None:
    one, other = (NarrowRowTable(3, "sgd", 7, UNIFORM) for _ in range(2))
    grads, hyper = numbers(1, len(IDS), 3), one.rule.hyper({"lr": 0.1})
    one.push(IDS, grads, hyper)
    other.learn(other.insert(IDS), grads, hyper)
    np.testing.assert_array_equal(one.pull(IDS), other.pull(IDS))


# -- rows in two layers, compared with dicts ------------------------------------------------------

DIM = 3


class Layer:
    """A layer, and a dict with the same rows; None: removed."""

    def __init__(self, room: int) -> None:
        self.slots = np.zeros(layered_rows.words_for(room), np.int64)
        self.rows = np.zeros(room * DIM, np.float32)
        self.counters = np.zeros(2, np.int64)
        self.expected: dict[int, float | None] = {}

    def upsert(self, random: np.random.Generator, ids: np.ndarray) -> None:
        removed = random.random(len(ids)) < 0.2
        values = random.standard_normal((len(ids), 1)).astype(np.float32)
        layered_rows.upsert(
            ids,
            removed.view(np.int8),
            np.repeat(values, DIM, axis=1),
            self.slots,
            self.rows,
            self.counters,
        )
        for one, gone, value in zip(ids.tolist(), removed, values[:, 0].tolist(), strict=True):
            self.expected[one] = None if gone else value


def some_ids(random: np.random.Generator, count: int) -> np.ndarray:
    """Ids of a few thousand, over all of int64."""
    return random.integers(-2500, 2500, count) * 0x1234567890ABC


def test_the_upper_layer_is_found_first() -> None:
    random = np.random.default_rng(0)
    lower, upper = Layer(9000), Layer(9000)
    for _ in range(3):
        lower.upsert(random, some_ids(random, 1000))
        upper.upsert(random, some_ids(random, 700))
    for layer in (lower, upper):
        assert layer.counters[KNOWN] == len(layer.expected)
        assert layer.counters[USED] <= len(layer.expected) * 3
    ids = some_ids(random, 3000)
    for above in (upper, None):
        numbers, out = np.empty(len(ids), np.int64), np.zeros((len(ids), DIM), np.float32)
        slots = np.empty(0, np.int64) if above is None else above.slots
        found = (lower.rows, np.empty(0, np.float32))
        if above is not None:
            found = (above.rows, lower.rows)
        layered_rows.find_layered(ids, slots, lower.slots, numbers)
        unknown = layered_rows.read_layered(*found, numbers, out)
        tables = [lower.expected] if above is None else [above.expected, lower.expected]
        want = [next((t[i] for t in tables if i in t), None) for i in ids.tolist()]
        assert unknown == want.count(None) > 0
        assert [number == -1 for number in numbers] == [one is None for one in want]
        assert same(out[:, -1], np.array([one or 0.0 for one in want], np.float32))


def test_an_index_grows() -> None:
    random = np.random.default_rng(1)
    layer = Layer(3000)
    layer.upsert(random, some_ids(random, 3000))
    larger = np.zeros(4 * len(layer.slots), np.int64)
    layered_rows.grow(layer.slots, larger)
    ids = np.array(list(layer.expected))
    numbers, others = np.empty(len(ids), np.int64), np.empty(len(ids), np.int64)
    none = np.empty(0, np.int64)
    assert layered_rows.find_layered(ids, none, layer.slots, numbers) == 0
    assert layered_rows.find_layered(ids, none, larger, others) == 0
    assert same(numbers, others)
    gone = [value is None for value in layer.expected.values()]
    assert [number == REMOVED for number in numbers] == gone
