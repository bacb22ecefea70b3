# SPDX-License-Identifier: Apache-2.0
"""Buckets have the same memory in each run, but for those that a caller gets."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, fx

from fleetlight.static.coding.buckets import keep_buckets
from fleetlight.static.coding.python import function_of
from fleetlight.static.ops.reductions import REDUCE, reducing

aten: Any = torch.ops.aten


class Places:
    """Notes where buckets are, and what was in them."""

    def __init__(self) -> None:
        self.found: list[tuple[int, list[float]]] = []

    def begin(self, index: int, bucket: Tensor, inner: int | None) -> None:
        self.found.append((bucket.data_ptr(), bucket.tolist()))

    def end(self, index: int, bucket: Tensor) -> None:
        """Nothing was done."""


def bucket_of(graph: fx.Graph) -> fx.Node:
    rows = [graph.placeholder("x"), graph.placeholder("y")]
    bucket = graph.call_function(aten.cat.default, (rows,))
    graph.call_function(REDUCE, (bucket, 0))
    return bucket


def ran(graph: fx.Graph) -> tuple[Places, list[Any]]:
    """Twice, and nothing of what was answered is let go."""
    keep_buckets(graph)
    function, places, answers = function_of(graph), Places(), []
    with reducing(places):
        for value in (1.0, 2.0):
            answers.append(function(torch.full([2], value), torch.full([1], -value)))
    return places, answers


def test_their_memory_is_kept_and_filled_anew() -> None:
    graph = fx.Graph()
    pieces = graph.call_function(aten.split_with_sizes.default, (bucket_of(graph), [2, 1]))
    piece = graph.call_function(operator.getitem, (pieces, 1))
    graph.output([graph.call_function(aten.neg.default, (piece,))])
    places, answers = ran(graph)
    (first, before), (second, after) = places.found
    assert first == second
    assert (before, after) == ([1.0, 1.0, -1.0], [2.0, 2.0, -2.0])
    assert [answer[0].tolist() for answer in answers] == [[1.0], [2.0]]


def test_a_caller_keeps_what_it_got_of_one() -> None:
    graph = fx.Graph()
    pieces = graph.call_function(aten.split_with_sizes.default, (bucket_of(graph), [2, 1]))
    graph.output([graph.call_function(operator.getitem, (pieces, 1))])
    places, answers = ran(graph)
    assert places.found[0][0] != places.found[1][0]
    assert [answer[0].tolist() for answer in answers] == [[-1.0], [-2.0]]


def test_other_tensors_that_are_put_together_are_new_each_time() -> None:
    graph = fx.Graph()
    rows = [graph.placeholder("x"), graph.placeholder("y")]
    graph.output([graph.call_function(aten.cat.default, (rows,))])
    _, answers = ran(graph)
    assert [answer[0].tolist() for answer in answers] == [[1.0, 1.0, -1.0], [2.0, 2.0, -2.0]]
