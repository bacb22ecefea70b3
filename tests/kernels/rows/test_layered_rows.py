# SPDX-License-Identifier: Apache-2.0
"""Rows in two layers, compared with dicts."""

import numpy as np
from tests.kernels.batches import same

from fleetlight.kernels.rows import layered_rows
from fleetlight.kernels.rows.layered_rows import KNOWN, REMOVED, USED

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
