# SPDX-License-Identifier: Apache-2.0
"""Placement stores every element once and balances the servers."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
from tests.ps.serving import plan

from fleetlight.kernels import BUCKETS, buckets, servers_of
from fleetlight.ps.placement import CUT_ABOVE, CUT_UNIT, Placement, buckets_of
from fleetlight.ps.plan import DensePlan, OptimizerPlan, Plan


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
