# SPDX-License-Identifier: Apache-2.0
"""Plans, where they place parameters, and what crosses a connection."""

import itertools
import math
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from tests.ps.serving import ids_of, plan, rows_of

from fleetlight import errors
from fleetlight.errors import FleetError, PeerError
from fleetlight.kernels import BUCKETS, buckets, servers_of
from fleetlight.ps.dtypes import flat_array
from fleetlight.ps.gradients import Gradients, TablePart, dense_square, mean, not_finite, scaled
from fleetlight.ps.message_base import error_of, failure_of
from fleetlight.ps.messages import Failure
from fleetlight.ps.placement import CUT_ABOVE, CUT_UNIT, Block, BlockSlice, Placement, buckets_of
from fleetlight.ps.plan import DensePlan, OptimizerPlan, Plan, RulePlan, first_difference

# Comparison of plans by digest and by first difference.


def changed(of: Plan, **facts: Any) -> Plan:
    return msgspec.structs.replace(of, **facts)


def table(of: Plan, number: int, **facts: Any) -> Plan:
    tables = list(of.tables)
    tables[number] = msgspec.structs.replace(tables[number], **facts)
    return changed(of, tables=tables)


def test_equal_plans_have_equal_digests() -> None:
    assert first_difference(plan(), plan()) is None
    assert plan().digest() == plan().digest()
    assert plan().digest() != plan(workers=3).digest()


ONE = plan()


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        (changed(ONE, mode="async"), "plan.mode: 'sync' here, 'async' there"),
        (table(ONE, 1, dim=9), "plan.tables[items].dim: 2 here, 9 there"),
        (table(ONE, 0, dtype="bf16"), "plan.tables[users].dtype: 'fp32' here, 'bf16' there"),
        (table(ONE, 1, wire="bf16"), "plan.tables[items].wire: 'fp32' here, 'bf16' there"),
        (
            table(ONE, 0, rule=RulePlan("adagrad", {"initial_accumulator_value": 0.0})),
            "plan.tables[users].rule.name: 'sgd' here, 'adagrad' there",
        ),
        (changed(ONE, tables=ONE.tables[:1]), "plan.tables[items]: 'present' here, 'absent' there"),
        (
            changed(ONE, dense=[*ONE.dense, DensePlan("more", (1,), "float32", 0, 0)]),
            "plan.dense[more]: 'absent' here, 'present' there",
        ),
        (
            changed(ONE, optimizers=ONE.optimizers * 2),
            "plan.optimizers: number of entries: 1 here, 2 there",
        ),
        (changed(ONE, tables=ONE.tables[::-1]), "plan.tables[0].name: 'users' here, 'items' there"),
    ],
)
def test_the_first_difference_is_named(other: Plan, expected: str) -> None:
    assert first_difference(ONE, other) == expected
    assert ONE.digest() != other.digest()


def test_table_returns_the_number_of_a_name() -> None:
    assert ONE.table("items") == 1
    with pytest.raises(KeyError):
        ONE.table("nothing")


# Placement stores every element once and balances the servers.


def planned(shapes: list[tuple[int, ...]], servers: int, **facts: Any) -> Plan:
    dense = [DensePlan(f"p{n}", shape, "float32", 0, 0) for n, shape in enumerate(shapes)]
    return plan("async", **{"server_num": servers, "dense": dense, **facts})


def loads(placement: Placement, servers: int) -> list[int]:
    return [sum(b.size for b in placement.blocks_of(s)) for s in range(servers)]


@pytest.mark.parametrize("servers", [1, 2, 3, 7])
def test_every_element_has_one_place(servers: int) -> None:
    shapes: list[tuple[int, ...]] = [(CUT_ABOVE + 100,), (1000, 300), (5,), (), (3, 0), (77, 3)]
    placement = Placement(planned(shapes, servers))
    found: dict[int, list[tuple[int, int]]] = {}
    for server in range(servers):
        for block in placement.blocks_of(server):
            ends = 0
            for piece in block.pieces:
                assert piece.offset == ends
                ends += piece.size
                found.setdefault(piece.parameter, []).append((piece.start, piece.stop))
            assert block.size == ends
            assert (block.server, block.dtype) == (server, "float32")
    for number, shape in enumerate(shapes):
        spans = sorted(found[number])
        assert spans[0][0] == 0
        assert spans[-1][1] == math.prod(shape)
        assert all(left[1] == right[0] for left, right in itertools.pairwise(spans))
        assert all(start % CUT_UNIT == 0 for start, _ in spans)


def test_large_parameters_are_cut_evenly_if_their_rule_is_elementwise() -> None:
    shapes: list[tuple[int, ...]] = [(1000, 1000), (10,)]
    assert max(loads(Placement(planned(shapes, 4)), 4)) <= 250_100
    whole = [OptimizerPlan("mine.Lars", 1, elementwise=False)]
    assert sorted(loads(Placement(planned(shapes, 4, optimizers=whole)), 4)) == [0, 0, 10, 10**6]
    small: list[tuple[int, ...]] = [(CUT_ABOVE,)]
    assert sorted(loads(Placement(planned(small, 2)), 2)) == [0, CUT_ABOVE]


def test_each_block_has_one_optimizer_and_dtype() -> None:
    dense = [
        DensePlan(f"p{n}", (n + 1,), ("float32", "float64")[n % 2], n // 2, 0) for n in range(4)
    ]
    two = [OptimizerPlan("torch.optim.sgd.SGD", 1, True)] * 2
    placement = Placement(planned([], 1, dense=dense, optimizers=two))
    blocks = [
        (b.optimizer, b.dtype, [p.parameter for p in b.pieces]) for b in placement.blocks_of(0)
    ]
    assert blocks == [
        (0, "float32", [0]),
        (0, "float64", [1]),
        (1, "float32", [2]),
        (1, "float64", [3]),
    ]
    assert [b.optimizer for b in placement.blocks_of(0, 1)] == [1, 1]


def test_servers_store_no_dense_blocks_if_workers_average() -> None:
    assert Placement(planned([(3,)], 2, serves_dense=False)).blocks_of(1) == []


@pytest.mark.parametrize("servers", [1, 2, 3, 7])
def test_servers_own_the_ids_of_their_buckets(servers: int) -> None:
    spans = [buckets_of(server, servers) for server in range(servers)]
    assert [b for span in spans for b in span] == list(range(BUCKETS))
    ids = np.arange(500)
    owners = servers_of(ids, servers)
    assert all(b in spans[s] for b, s in zip(buckets(ids), owners, strict=True))


# Errors across a connection.


KINDS = [k for k in vars(errors).values() if isinstance(k, type) and issubclass(k, FleetError)]


@pytest.mark.parametrize("kind", KINDS)
def test_every_error_class_round_trips(kind: type[FleetError]) -> None:
    error = error_of(failure_of(kind("it is so")), "server 1")
    assert type(error) is kind
    assert str(error) == "server 1: it is so"


def test_an_unnamed_subclass_is_sent_as_its_nearest_base() -> None:
    class FinerError(errors.PlanError):
        pass

    assert failure_of(FinerError("x")) == Failure("PlanError", "x")


@pytest.mark.parametrize("name", ["SystemExit", "annotations", "did_you_mean", "nonsense", ""])
def test_unknown_names_become_a_peer_error(name: str) -> None:
    assert type(error_of(Failure(name, "x"), "server 1")) is PeerError


def test_a_foreign_error_keeps_its_name_in_the_text() -> None:
    assert failure_of(KeyError("w")) == Failure("PeerError", "KeyError: 'w'")


# Gradients: their mean over workers, their scaling, and the check for finite values.


def block(dtype: str = "float32") -> Block:
    return Block(0, 0, dtype, (BlockSlice(0, 0, 2, 0), BlockSlice(1, 0, 1, 2)))


def dense(values: list[float], dtype: str = "float32") -> Any:
    return flat_array(torch.tensor(values).to(getattr(torch, dtype)))


def gradients(
    tables: dict[int, TablePart], values: list[float] | None, absent: set[int], dtype: str
) -> Gradients:
    arrays = None if values is None else [dense(values, dtype)]
    return Gradients(tables, arrays, [block(dtype)], frozenset(absent))


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
def test_mean_is_over_all_workers(dtype: str) -> None:
    first = gradients({0: TablePart(ids_of([1, 2]), rows_of([2, 4]))}, [1, 2, 3], {0}, dtype)
    second = gradients({1: TablePart(ids_of([1]), rows_of([6]))}, None, set(), dtype)
    third = gradients({0: TablePart(ids_of([2]), rows_of([8]))}, [2, 1, 0], {0, 1}, dtype)
    found = mean([first, second, third, gradients({}, [1, 1, 1], {0}, dtype)])
    # the table sums the rows of one id later
    assert found.tables[0].ids.tolist() == [1, 2, 2]
    assert found.tables[0].rows[:, 0].tolist() == [0.5, 1, 2]
    assert found.tables[1].rows[:, 0].tolist() == [1.5]
    assert found.dense is not None
    np.testing.assert_array_equal(found.dense[0], dense([1, 1, 1], dtype))
    assert found.absent == {0}
    # the inputs are unchanged
    np.testing.assert_array_equal(first.tables[0].rows, rows_of([2, 4]))
    assert first.dense is not None
    np.testing.assert_array_equal(first.dense[0], dense([1, 2, 3], dtype))


def test_mean_of_one_worker_copies_nothing() -> None:
    only = gradients({}, [1, 2, 3], set(), "float32")
    assert mean([only]) is only


def test_half_precision_is_summed_in_float32() -> None:
    found = mean([gradients({}, [60000, 60000, 0.001], set(), "float16") for _ in range(3)])
    assert found.dense is not None
    np.testing.assert_array_equal(found.dense[0], dense([60000, 60000, 0.001], "float16"))


def test_mean_concatenates_counts_without_scaling() -> None:
    one = TablePart(ids_of([1]), rows_of([1]), rows_of([3])[:, 0], rows_of([1])[:, 0])
    two = TablePart(ids_of([2]), rows_of([1]), rows_of([5])[:, 0], rows_of([0])[:, 0])
    parts = [gradients({0: part}, None, set(), "float32") for part in (one, two)]
    found = mean(parts).tables[0]
    assert found.shows is not None
    assert found.clicks is not None
    # counts are not divided by the number of workers
    assert (found.shows.tolist(), found.clicks.tolist()) == ([3, 5], [1, 0])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_scaled_does_not_change_its_input(dtype: str) -> None:
    given = gradients({0: TablePart(ids_of([1]), rows_of([4]))}, [2, 4, 8], set(), dtype)
    found = scaled(given, 0.5)
    assert found.dense is not None
    np.testing.assert_array_equal(found.dense[0], dense([1, 2, 4], dtype))
    assert found.tables[0].rows.tolist() == [[2, 2]]
    assert given.tables[0].rows.tolist() == [[4, 4]]
    assert dense_square(given) == 4 + 16 + 64
    assert dense_square(gradients({}, None, set(), dtype)) == 0


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_not_finite_names_the_first_bad_gradient(value: float, dtype: str) -> None:
    known = plan(dense=[*plan().dense, *plan().dense])
    fine = {0: TablePart(ids_of([1, 2]), rows_of([3e38, 3e38]))}
    # finite values whose sum overflows are fine
    assert not_finite(gradients(fine, [3e38, 3e38, 1], set(), dtype), known) is None
    assert not_finite(gradients(fine, None, set(), dtype), known) is None
    bad = {**fine, 1: TablePart(ids_of([1]), rows_of([value]))}
    assert not_finite(gradients(bad, [1, 2, 3], set(), dtype), known) == "table 'items'"
    assert not_finite(gradients(fine, [1, 2, value], set(), dtype), known) == "parameter 'bias'"
