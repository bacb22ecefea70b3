# SPDX-License-Identifier: Apache-2.0
"""Tensors reduced at once share buckets with tensors of their kind."""

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
    """A route of two workers with equal values; it records the buckets."""

    def __init__(self) -> None:
        self.buckets: list[tuple[tuple[ParameterSlice, ...], list[float]]] = []

    def start(self, bucket: Bucket, stamp: GradientStamp) -> Future[Any]:
        self.buckets.append((bucket.parts, bucket.buffer.tolist()))
        bucket.buffer.mul_(2)
        future: Future[Any] = Future()
        future.set_result(bucket.buffer)
        return future


def reduced(
    named: Mapping[str, Tensor], limits: BucketLimits, parameters: Mapping[str, Tensor]
) -> tuple[Doubling, int]:
    """Only `w` may be coded."""
    route, finished = Doubling(), []

    def settle(started: Sequence[Future[Tensor]]) -> None:
        finished.extend(future.wait() for future in started)

    reducer = Reducer(1, [], route=route)
    count = reduce_now(reducer, named, settle, limits=limits, parameters=parameters, coded={"w"})
    assert len(finished) == len(route.buckets) == count
    return route, count


def test_codable_tensors_travel_separately_with_their_names() -> None:
    named = {"b": torch.ones(2), "moved/w": torch.ones(2, 2), "c": torch.ones(1)}
    route, count = reduced(named, BucketLimits(), {"w": torch.zeros(2, 2)})
    assert count == 2
    assert sorted(route.buckets) == [((), [1.0] * 3), ((ParameterSlice("moved/w", 4),), [1.0] * 4)]
    assert all(bool((tensor == 2).all()) for tensor in named.values())


def test_bucket_values_follow_the_parameters_layout() -> None:
    parameter = torch.zeros(3, 2).t()
    moved = torch.arange(6.0).reshape(2, 3)
    route, _ = reduced({"moved/w": moved}, BucketLimits(), {"w": parameter})
    assert route.buckets[0][1] == [0, 3, 1, 4, 2, 5]
    assert moved.tolist() == [[0, 2, 4], [6, 8, 10]]


def test_buckets_have_limits_and_one_type() -> None:
    named = {str(n): torch.ones(4) for n in range(3)} | {"d": torch.ones(4).double()}
    _, count = reduced(named, BucketLimits(bytes=32, first_bytes=32), {})
    assert count == 3
