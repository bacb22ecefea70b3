# SPDX-License-Identifier: Apache-2.0
"""Reductions: in flight when the job is left, at once, and which gradients a codec covers."""

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from tests.collective.doubles import Slow
from torch import Tensor, nn
from torch.futures import Future

from fleetlight.collective.buckets import BucketLimits, ParameterSlice
from fleetlight.collective.codecs.compression import Compression
from fleetlight.collective.codecs.forms.int8 import Int8
from fleetlight.collective.reduction.coverage import coded_in, sparse_names, warn_of_uncoded
from fleetlight.collective.reduction.reduce_now import reduce_now
from fleetlight.collective.reduction.reducer import Reducer
from fleetlight.collective.routes.route import Bucket
from fleetlight.collective.stamp import GradientStamp
from fleetlight.observe.log import logger


class Failing(Slow):
    """A route whose buckets are lost."""

    def start(self, bucket: Bucket, stamp: GradientStamp) -> Future[Any]:
        self.lost: Future[Any] = Future()
        self.lost.set_exception(RuntimeError(f"bucket {bucket.index} is lost"))  # type: ignore[arg-type]
        return self.lost


def test_a_bucket_in_flight_holds_no_process_group() -> None:
    """A thread of the process group that frees it last would wait for itself."""
    reducer = Reducer(2, [], route=Slow())
    future = reducer.reduce(Bucket(0, torch.ones(3)))
    freed = weakref.ref(reducer)
    del reducer
    assert freed() is None
    assert not future.done()


def test_the_first_failure_is_raised_once() -> None:
    reducer = Reducer(2, [], route=Failing())
    started = [reducer.reduce(Bucket(index, torch.ones(3))) for index in range(2)]
    with pytest.raises(RuntimeError, match="bucket 0 is lost"):
        reducer.settle(started)
    reducer.settle(started)


# Tensors reduced at once share buckets with tensors of their kind.


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


# Which gradients a codec covers: dense float32 ones of covered parameters.


def model() -> nn.ModuleDict:
    return nn.ModuleDict(
        {
            "sparse": nn.Embedding(8, 4, sparse=True),
            "bag": nn.EmbeddingBag(8, 4, sparse=True),
            "dense": nn.Embedding(8, 4),
            "wide": nn.Linear(4, 4, dtype=torch.float64),
            "small": nn.Linear(2, 2),
            "last": nn.Linear(4, 4),
        }
    )


def test_large_dense_float32_gradients_are_coded() -> None:
    module = model()
    found = coded_in(module, Compression(Int8(), min_size=16))
    assert sorted(found) == ["dense.weight", "last.weight"]
    assert found["last.weight"] is module["last"].weight
    assert coded_in(module, None) == {}


def test_sparse_embeddings_are_found() -> None:
    assert sparse_names(model()) == {"sparse.weight", "bag.weight"}
    assert sparse_names(nn.Embedding(3, 2, sparse=True)) == {"weight"}


def test_a_codec_that_covers_nothing_is_warned_about(monkeypatch: pytest.MonkeyPatch) -> None:
    warnings: list[str] = []
    monkeypatch.setattr(logger, "warning", lambda text, *values: warnings.append(text % values))
    warn_of_uncoded(nn.Linear(4, 4), Compression(Int8(), min_size=17))
    warn_of_uncoded(nn.Linear(4, 4), Compression(Int8(), min_size=16))
    assert warnings == [
        "int8 has no effect: all parameters of the model have one dimension, fewer values than "
        "min_size, or are excluded"
    ]
