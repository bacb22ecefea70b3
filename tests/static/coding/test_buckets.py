# SPDX-License-Identifier: Apache-2.0
"""Buckets reuse their memory in each run, except those that a caller fetches."""

import operator
from typing import Any

import torch
from torch import Tensor, fx

from fleetlight.static.coding.buckets import keep_buckets
from fleetlight.static.coding.python import function_of
from fleetlight.static.ops.reductions import REDUCE, reducing

aten: Any = torch.ops.aten


class BucketRecorder:
    """Records the address and the content of each bucket."""

    def __init__(self) -> None:
        self.found: list[tuple[int, list[float]]] = []

    def begin(self, index: int, bucket: Tensor, inner: int | None) -> None:
        self.found.append((bucket.data_ptr(), bucket.tolist()))

    def end(self, index: int, bucket: Tensor) -> None:
        """The bucket keeps its values."""


def bucket_of(graph: fx.Graph) -> fx.Node:
    rows = [graph.placeholder("x"), graph.placeholder("y")]
    bucket = graph.call_function(aten.cat.default, (rows,))
    graph.call_function(REDUCE, (bucket, 0))
    return bucket


def ran(graph: fx.Graph) -> tuple[BucketRecorder, list[Any]]:
    """Runs the graph twice and keeps all results alive."""
    keep_buckets(graph)
    function, recorder, results = function_of(graph), BucketRecorder(), []
    with reducing(recorder):
        for value in (1.0, 2.0):
            results.append(function(torch.full([2], value), torch.full([1], -value)))
    return recorder, results


def test_bucket_memory_is_reused_and_refilled() -> None:
    graph = fx.Graph()
    pieces = graph.call_function(aten.split_with_sizes.default, (bucket_of(graph), [2, 1]))
    piece = graph.call_function(operator.getitem, (pieces, 1))
    graph.output([graph.call_function(aten.neg.default, (piece,))])
    recorder, results = ran(graph)
    (first, before), (second, after) = recorder.found
    assert first == second
    assert (before, after) == ([1.0, 1.0, -1.0], [2.0, 2.0, -2.0])
    assert [result[0].tolist() for result in results] == [[1.0], [2.0]]


def test_a_fetched_bucket_is_not_overwritten() -> None:
    graph = fx.Graph()
    pieces = graph.call_function(aten.split_with_sizes.default, (bucket_of(graph), [2, 1]))
    graph.output([graph.call_function(operator.getitem, (pieces, 1))])
    recorder, results = ran(graph)
    assert recorder.found[0][0] != recorder.found[1][0]
    assert [result[0].tolist() for result in results] == [[-1.0], [-2.0]]


def test_other_concatenations_are_allocated_in_each_run() -> None:
    graph = fx.Graph()
    rows = [graph.placeholder("x"), graph.placeholder("y")]
    graph.output([graph.call_function(aten.cat.default, (rows,))])
    _, results = ran(graph)
    assert [result[0].tolist() for result in results] == [[1.0, 1.0, -1.0], [2.0, 2.0, -2.0]]
