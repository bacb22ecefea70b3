# SPDX-License-Identifier: Apache-2.0
"""Bags of rows, compared with the twin and with torch's EmbeddingBag."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from tests.kernels.batches import STRANGE, id_batches, numbers, same
from torch.nn import functional

from fleetlight import kernels
from fleetlight.errors import ConfigError
from fleetlight.kernels.ids.bucket_order import _sort_buckets
from fleetlight.kernels.ids.pooling import (
    EACH,
    MAX,
    MEAN,
    SUM,
    WEIGHTED,
    Pooling,
    pool,
    position_grads,
    spread,
    wrong_bounds,
)

lengths = st.lists(st.integers(0, 5), min_size=1, max_size=12)
MODES = ["sum", "mean", "max"]


@settings(deadline=None, max_examples=50)
@given(lengths, st.sampled_from(MODES), st.booleans(), st.integers(1, 18), st.integers(0, 99))
def test_bags_equal_the_twin(
    sizes: list[int], mode: str, weighted: bool, dim: int, seed: int
) -> None:
    offsets = np.cumsum([0, *sizes])
    count = int(offsets[-1])
    inverse = np.random.default_rng(seed).integers(0, 5, count).astype(np.int32)
    rows, grads = numbers(seed, 5, dim), numbers(seed + 1, len(sizes), dim)
    weights = numbers(seed + 2, count) if weighted and mode == "sum" else None
    bags, chosen = kernels.gather_bags(rows, inverse, offsets, weights, mode)  # type: ignore[arg-type]
    twin_bags, twin_chosen = kernels.twin_table.gather_bags(rows, inverse, offsets, weights, mode)
    np.testing.assert_allclose(bags, twin_bags, rtol=1e-5, atol=1e-6)
    assert (chosen is None) == (twin_chosen is None)
    assert chosen is None or twin_chosen is None or same(chosen, twin_chosen)
    spread = kernels.spread_bags(grads, inverse, offsets, weights, mode, 5, chosen)  # type: ignore[arg-type]
    expected = kernels.twin_table.spread_bags(grads, inverse, offsets, weights, mode, 5, chosen)
    np.testing.assert_allclose(spread, expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(
        kernels.weight_grads(grads, rows, inverse, offsets),
        kernels.twin_table.weight_grads(grads, rows, inverse, offsets),
        rtol=1e-4,
        atol=1e-5,
    )


@pytest.mark.parametrize("mode", MODES)
def test_bags_equal_torch(mode: str) -> None:
    rows = torch.randn(9, 4, requires_grad=True)
    inverse, offsets = torch.randint(0, 9, (20,)), torch.tensor([0, 3, 3, 11])
    weights = torch.rand(20, requires_grad=True) if mode == "sum" else None
    bags = functional.embedding_bag(
        inverse, rows, offsets, mode=mode, per_sample_weights=weights, sparse=False
    )
    grads = torch.randn(4, 4)
    bags.backward(grads)
    ends = np.append(offsets.numpy(), 20)
    plain = None if weights is None else weights.detach().numpy()
    values = rows.detach().numpy()
    ours, chosen = kernels.gather_bags(values, inverse.numpy(), ends, plain, mode)  # type: ignore[arg-type]
    np.testing.assert_allclose(ours, bags.detach().numpy(), rtol=1e-5, atol=1e-6)
    spread = kernels.spread_bags(grads.numpy(), inverse.numpy(), ends, plain, mode, 9, chosen)  # type: ignore[arg-type]
    assert rows.grad is not None
    np.testing.assert_allclose(spread, rows.grad.numpy(), rtol=1e-5, atol=1e-6)
    if weights is not None:
        assert weights.grad is not None
        ours = kernels.weight_grads(grads.numpy(), values, inverse.numpy(), ends)
        np.testing.assert_allclose(ours, weights.grad.numpy(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("offsets", [[0], [1, 2], [0, 3], [0, 2, 1, 2], []])
def test_offsets_must_rise_from_zero_to_the_number_of_positions(offsets: list[int]) -> None:
    with pytest.raises(ConfigError, match="to rise from 0 to 2, one more than there are bags"):
        kernels.gather_bags(np.ones((1, 2)), [0, 0], offsets)


def test_arguments_that_torch_refuses_are_refused() -> None:
    with pytest.raises(ConfigError, match="expected mode='sum' as in torch"):
        kernels.gather_bags(np.ones((1, 2)), [0], [0, 1], [1.0], "mean")
    with pytest.raises(ConfigError, match="1 weights for 2 positions"):
        kernels.gather_bags(np.ones((1, 2)), [0, 0], [0, 2], [1.0])
    with pytest.raises(ConfigError, match="known names: max, mean, sum"):
        kernels.gather_bags(np.ones((1, 2)), [0], [0, 1], mode="product")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="needs chosen="):
        kernels.spread_bags(np.ones((1, 2)), [0], [0, 1], None, "max", 1)


def test_max_chooses_the_first_of_equal_values() -> None:
    _, chosen = kernels.gather_bags(np.ones((3, 1)), [2, 0, 1], [0, 3], mode="max")
    assert chosen is not None
    assert chosen.tolist() == [[2]]


def test_max_propagates_nan() -> None:
    rows = np.array([[1], [np.nan], [2]], np.float32)
    bags, chosen = kernels.gather_bags(rows, [0, 1, 2], [0, 3], mode="max")
    assert np.isnan(bags[0, 0])
    assert chosen is not None
    assert chosen.tolist() == [[1]]


# -- the rows of many features in one kernel, compared with the twin and with bags of one feature

#: rows of each table
ROWS = 5
modes = st.lists(st.sampled_from([SUM, MEAN, MAX, WEIGHTED, EACH]), min_size=1, max_size=6)


def pooling_of(chosen: list[int], samples: int, seed: int) -> tuple[Pooling, Any]:
    """Features with these modes, each with its own table, and the rows of all tables."""
    random = np.random.default_rng(seed)
    dims = random.integers(1, 19, len(chosen))
    width = int(sum(d for d, mode in zip(dims, chosen, strict=True) if mode != EACH))
    lengths = random.integers(0, 4, (len(chosen), samples))
    bounds = np.cumsum(np.pad(lengths, ((0, 0), (1, 0))), axis=1)
    bounds += np.concatenate(([0], np.cumsum(lengths.sum(1))[:-1]))[:, None]
    inverse = random.integers(0, ROWS, lengths.sum()).astype(np.int32)
    layout, first, column, free = [], 0, 0, samples * width
    for dim, mode, (start, *_, stop) in zip(dims, chosen, bounds, strict=True):
        layout.append((first, dim, mode, free if mode == EACH else column, width))
        if mode == EACH:
            span = inverse[start:stop]
            span[random.random(len(span)) < 0.3] = -1
            free += (stop - start) * dim
        else:
            column += dim
        first += ROWS * dim
    weights = numbers(seed, len(inverse)) if WEIGHTED in chosen else np.empty(0, np.float32)
    pooling = Pooling(inverse, bounds, weights, np.array(layout, np.int64), int(free))
    return pooling, numbers(seed + 1, first)


@settings(deadline=None, max_examples=60)
@given(modes, st.integers(1, 5), st.integers(0, 99))
def test_pooled_features_equal_the_twin(chosen: list[int], samples: int, seed: int) -> None:
    pooling, rows = pooling_of(chosen, samples, seed)
    out, largest = pool(rows, pooling)
    expected, expected_largest = kernels.twin_table.pool(rows, pooling)
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-6)
    grads = numbers(seed + 2, pooling.size)
    if len(largest):
        # other features do not write there
        pooled = [layout for layout in pooling.layout if layout[2] == MAX]
        for _, dim, _, at, step in pooled:
            cells = at + np.arange(samples)[:, None] * step + np.arange(dim)
            assert np.array_equal(largest[cells], expected_largest[cells])
    np.testing.assert_allclose(
        spread(grads, pooling, len(rows), largest),
        kernels.twin_table.spread(grads, pooling, len(rows), largest),
        rtol=1e-4,
        atol=1e-5,
    )
    np.testing.assert_allclose(
        position_grads(grads, rows, pooling),
        kernels.twin_table.position_grads(grads, rows, pooling),
        rtol=1e-4,
        atol=1e-5,
    )


@pytest.mark.parametrize(("mode", "name"), [(SUM, "sum"), (MEAN, "mean"), (MAX, "max")])
def test_pooled_features_equal_their_bags_bit_for_bit(mode: int, name: Any) -> None:
    pooling, rows = pooling_of([mode, mode, mode], 4, 7)
    out, largest = pool(rows, pooling)
    grads = numbers(3, pooling.size)
    spreads = spread(grads, pooling, len(rows), largest)
    for (first, dim, _, at, step), bounds in zip(pooling.layout, pooling.bounds, strict=True):
        mine = rows[first : first + ROWS * dim].reshape(ROWS, dim)
        inverse = pooling.inverse[bounds[0] : bounds[-1]]
        cells = at + np.arange(4)[:, None] * step + np.arange(dim)
        bags, chosen = kernels.gather_bags(mine, inverse, bounds - bounds[0], mode=name)
        assert np.array_equal(out[cells], bags)
        alone = kernels.spread_bags(
            grads[cells], inverse, bounds - bounds[0], mode=name, count=ROWS, chosen=chosen
        )
        assert np.array_equal(spreads[first : first + ROWS * dim], alone.reshape(-1))


def test_features_with_wrong_bounds_are_found() -> None:
    bounds = np.array([[0, 1, 3], [1, 1, 3], [0, 2, 2], [0, 4, 3], [0, 0, 3]])
    assert wrong_bounds(bounds, np.array([3] * 5)).tolist() == [1, 2, 3]


# -- dedup of the ids of a batch, grouped by server -----------------------------------------------


@settings(deadline=None)
@given(id_batches, st.integers(1, 5))
def test_dedup_equals_the_twin(ids: NDArray[np.int64], servers: int) -> None:
    ours, twin = kernels.dedup(ids, servers), kernels.twin_table.dedup(ids, servers)
    assert same(ours.ids, twin.ids)
    assert same(ours.inverse, twin.inverse)
    assert same(ours.starts, twin.starts)


@settings(deadline=None)
@given(id_batches, id_batches)
def test_member_equals_the_twin(ids: NDArray[np.int64], of: NDArray[np.int64]) -> None:
    assert same(kernels.member(ids, of), kernels.twin_table.member(ids, of))


def test_dedup_of_a_large_batch() -> None:
    ids = np.random.default_rng(0).zipf(1.2, 50_000)
    deduped = kernels.dedup(ids, 3)
    assert (deduped.ids[deduped.inverse] == ids).all()
    assert len(deduped.ids) == len(np.unique(ids))
    parts = [deduped.ids[deduped.slice_of(s)] for s in range(3)]
    assert all((kernels.twin_table.servers_of(part, 3) == s).all() for s, part in enumerate(parts))
    assert sum(map(len, parts)) == len(deduped.ids)


def test_ids_that_collide_in_one_slot_stay_distinct() -> None:
    # the low bits of the hash choose the slot of the scratch table: here the same for all
    candidates = np.arange(3_000_000)
    ids = candidates[kernels.twin_table.splitmix64(candidates) & np.uint64(0xFFFF) == 0]
    assert len(ids) > 20
    twice = np.concatenate([ids, ids[::-1]])
    assert same(kernels.dedup(twice).inverse, kernels.twin_table.dedup(twice, 1).inverse)


def test_read_only_and_int32_ids_are_accepted() -> None:
    assert kernels.dedup(np.frombuffer(np.arange(4).tobytes(), np.int64)).ids.tolist() == [
        0,
        1,
        2,
        3,
    ]
    assert kernels.dedup(np.array([[3, 3], [1, 2]], np.int32)).inverse.tolist() == [0, 0, 1, 2]


def test_float_ids_are_refused() -> None:
    with pytest.raises(ConfigError, match="ids are float32, expected integers"):
        kernels.dedup(np.ones(3, np.float32))


# -- `gather` copies rows to samples; `sum_by` sums gradients of samples by row -------------------


@settings(deadline=None)
@given(st.lists(st.integers(0, 6), max_size=40), st.integers(1, 20))
def test_gather_and_sum_by_equal_the_twins(positions: list[int], dim: int) -> None:
    inverse = np.array(positions, np.int32)
    rows, grads = numbers(0, 7, dim), numbers(1, len(inverse), dim)
    assert same(kernels.gather(rows, inverse), kernels.twin_table.gather(rows, inverse))
    assert same(kernels.sum_by(grads, inverse, 7), kernels.twin_table.sum_by(grads, inverse, 7))


def test_results_are_written_to_out() -> None:
    out = np.full((2, 3), 9, np.float32)
    assert kernels.sum_by(np.ones((3, 3)), [0, 0, 0], 2, out=out) is out
    assert out.tolist() == [[3, 3, 3], [0, 0, 0]]


@pytest.mark.parametrize("position", [-1, 2])
def test_positions_out_of_range_are_refused(position: int) -> None:
    with pytest.raises(ConfigError, match=r"in 2 rows, expected 0\.\.1"):
        kernels.gather(np.ones((2, 3)), [position])
    with pytest.raises(ConfigError, match=r"in 2 rows, expected 0\.\.1"):
        kernels.sum_by(np.ones((1, 3)), [position], 2)


def test_mismatched_shapes_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"gradients have the shape \[2, 3\], expected \[1, 3\]"):
        kernels.sum_by(np.ones((2, 3)), [0], 1)
    with pytest.raises(ConfigError, match=r"out is float32\[4, 3\], expected .*\[1, 3\]"):
        kernels.gather(np.ones((2, 3)), [0], out=np.ones((4, 3), np.float32))


# -- hashes, buckets and servers of ids -----------------------------------------------------------


def test_hashes_are_part_of_the_format() -> None:
    # the first outputs of the published splitmix64 generator for seeds 0, 1 and -1
    expected = [0xE220A8397B1DCDAF, 0x910A2DEC89025CC1, 0xE4D971771B652C20]
    assert kernels.splitmix64([0, 1, -1]).tolist() == expected


@settings(deadline=None)
@given(id_batches, st.integers(1, 40))
def test_hashes_buckets_and_servers_equal_the_twins(ids: NDArray[np.int64], servers: int) -> None:
    assert same(kernels.splitmix64(ids), kernels.twin_table.splitmix64(ids))
    assert same(kernels.buckets(ids), kernels.twin_table.buckets(ids))
    assert same(kernels.servers_of(ids, servers), kernels.twin_table.servers_of(ids, servers))


def test_servers_own_bucket_ranges_of_nearly_equal_size() -> None:
    ids = np.arange(100_000)
    owners = kernels.servers_of(ids, 3)[np.argsort(kernels.buckets(ids), kind="stable")]
    assert (np.diff(owners) >= 0).all()
    assert np.bincount(owners).tolist() == pytest.approx([33_333] * 3, rel=0.02)


@pytest.mark.parametrize("servers", [0, kernels.BUCKETS + 1])
def test_invalid_server_counts_are_refused(servers: int) -> None:
    with pytest.raises(ConfigError, match=f"{servers} servers, expected 1 to 16384"):
        kernels.servers_of([1], servers)


# -- the order of rows in checkpoints: by bucket, then by id --------------------------------------


def ids_of_one_bucket(count: int) -> NDArray[np.int64]:
    """Ids that all fall into bucket 0."""
    candidates = np.arange(count * 2**14 * 2)
    return candidates[kernels.twin_table.buckets(candidates) == 0][:count]


def sawtooth(count: int) -> NDArray[np.int64]:
    return np.arange(count) % 7


SHAPES = {
    "random": np.random.default_rng(0).integers(-(2**63), 2**63 - 1, 1000),
    "ascending": np.arange(1000),
    "descending": np.arange(1000)[::-1].copy(),
    "organ pipe": np.minimum(np.arange(1000), np.arange(1000)[::-1]),
    "few": sawtooth(1000),
    "one": np.zeros(1000, np.int64),
    "strange": np.array(STRANGE * 30),
    "nothing": np.zeros(0, np.int64),
}


@pytest.mark.parametrize("name", SHAPES)
def test_ids_of_one_bucket_are_sorted(name: str) -> None:
    ids = SHAPES[name].copy()
    rows = np.arange(len(ids), dtype=np.int32)
    _sort_buckets(np.array([0, len(ids)]), rows, ids)
    assert (ids == np.sort(SHAPES[name])).all()
    assert (SHAPES[name][rows] == ids).all()
    assert len(np.unique(rows)) == len(rows)


def ordered(
    ids: NDArray[np.int64],
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int32]]:
    """Return the starts of the buckets, the sorted ids and their former rows."""
    count = kernels.BucketCount()
    for some in np.array_split(ids, 3):
        count.add(some)
    sorted_ids, rows = ids.copy(), np.arange(len(ids), dtype=np.int32)
    kernels.put_in_bucket_order(count.starts, sorted_ids, rows)
    return count.starts, sorted_ids, rows


@settings(deadline=None)
@given(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=200) | st.permutations(range(60)))
def test_any_ids_are_sorted_by_bucket_and_id(given_ids: list[int]) -> None:
    ids = np.array(given_ids, np.int64)
    starts, in_order, rows = ordered(ids)
    of = kernels.twin_table.buckets(ids)
    assert (in_order == ids[np.lexsort((ids, of))]).all()
    assert (ids[rows] == in_order).all()
    assert len(np.unique(rows)) == len(ids)
    assert (starts == np.searchsorted(np.sort(of), np.arange(kernels.BUCKETS + 1))).all()


@pytest.mark.sampled(3)
@pytest.mark.slow
@pytest.mark.parametrize("count", [200, 0, 1])
def test_ids_that_share_one_bucket(count: int) -> None:
    ids = ids_of_one_bucket(count)
    starts, in_order, _ = ordered(np.random.default_rng(0).permutation(ids))
    assert (in_order == ids).all()
    assert starts.tolist() == [0] + [count] * kernels.BUCKETS


def test_many_ids() -> None:
    ids = np.random.default_rng(0).permutation(100_000) * 7919 - 10**9
    starts, in_order, rows = ordered(ids)
    assert (in_order == ids[np.lexsort((ids, kernels.twin_table.buckets(ids)))]).all()
    assert (ids[rows] == in_order).all()
    for bucket in (0, 1, 77, kernels.BUCKETS - 1):
        inside = in_order[starts[bucket] : starts[bucket + 1]]
        assert len(inside) > 0
        assert (kernels.twin_table.buckets(inside) == bucket).all()
