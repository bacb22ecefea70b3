# SPDX-License-Identifier: Apache-2.0
"""Tensors that are reduced at once share buckets with their like, and get their means."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from tests.collective.doubles import Slow
from torch import Tensor
from torch.futures import Future

from fleetlight.collective.buckets import BucketLimits, ParameterSlice
from fleetlight.collective.reduction.reduce_now import reduce_now
from fleetlight.collective.reduction.reducer import Reducer
from fleetlight.collective.routes.route import Bucket
from fleetlight.collective.stamp import GradientStamp


class Doubling(Slow):
    """A route of workers that all have the same; it keeps what came."""

    def __init__(self) -> None:
        self.came: list[tuple[tuple[ParameterSlice, ...], list[float]]] = []

    def start(self, bucket: Bucket, stamp: GradientStamp) -> Future[Any]:
        self.came.append((bucket.parts, bucket.buffer.tolist()))
        bucket.buffer.mul_(2)
        future: Future[Any] = Future()
        future.set_result(bucket.buffer)
        return future


def reduced(
    named: Mapping[str, Tensor], limits: BucketLimits, parameters: Mapping[str, Tensor]
) -> tuple[Doubling, int]:
    """`w` may travel coded."""
    route, waited = Doubling(), []

    def settle(started: Sequence[Future[Tensor]]) -> None:
        waited.extend(future.wait() for future in started)

    reducer = Reducer(1, [], route=route)
    count = reduce_now(reducer, named, settle, limits=limits, parameters=parameters, coded={"w"})
    assert len(waited) == len(route.came) == count
    return route, count


def test_what_may_be_coded_travels_apart_and_says_whose_it_is() -> None:
    named = {"b": torch.ones(2), "moved/w": torch.ones(2, 2), "c": torch.ones(1)}
    route, count = reduced(named, BucketLimits(), {"w": torch.zeros(2, 2)})
    assert count == 2
    assert sorted(route.came) == [((), [1.0] * 3), ((ParameterSlice("moved/w", 4),), [1.0] * 4)]
    assert all(bool((tensor == 2).all()) for tensor in named.values())


def test_values_lie_as_those_of_the_parameter_and_come_back_to_where_they_were() -> None:
    parameter = torch.zeros(3, 2).t()
    moved = torch.arange(6.0).reshape(2, 3)
    route, _ = reduced({"moved/w": moved}, BucketLimits(), {"w": parameter})
    assert route.came[0][1] == [0, 3, 1, 4, 2, 5]
    assert moved.tolist() == [[0, 2, 4], [6, 8, 10]]


def test_buckets_have_limits_and_one_type() -> None:
    named = {str(n): torch.ones(4) for n in range(3)} | {"d": torch.ones(4).double()}
    _, count = reduced(named, BucketLimits(bytes=32, first_bytes=32), {})
    assert count == 3
