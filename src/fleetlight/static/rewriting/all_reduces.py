# SPDX-License-Identifier: Apache-2.0
"""The all-reduces in a graph: the node that starts each, and the node that ends it."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Hashable

import torch
from torch import Tensor, fx

from fleetlight.static.graph.aliases import is_view
from fleetlight.static.ops.reductions import REDUCE, REDUCED
from fleetlight.static.rewriting.nodes import gradients_of, made_by
from fleetlight.torch_compat.operators import CAST

#: operations that only move data
_CARRIERS = (
    operator.getitem,
    torch.ops.aten.cat.default,
    torch.ops.aten.clone.default,
    CAST,
)


@dataclasses.dataclass(frozen=True)
class AllReduce:
    """One all-reduce of a bucket."""

    begin: fx.Node
    end: fx.Node

    @property
    def bucket(self) -> fx.Node:
        """The node that is reduced in place."""
        bucket = self.begin.args[0]
        assert isinstance(bucket, fx.Node)
        return bucket

    @property
    def value(self) -> Tensor:
        """The bucket as a fake tensor."""
        value: Tensor = self.bucket.meta["val"]
        return value

    @property
    def bytes(self) -> int:
        """The size of the bucket in bytes."""
        return self.value.numel() * self.value.element_size()

    @property
    def index(self) -> int:
        """The number of the bucket."""
        index = self.begin.args[1]
        assert isinstance(index, int)
        return index

    @property
    def is_coded(self) -> bool:
        """Whether it has a codec."""
        return self.begin.kwargs.get("codec") is not None

    @property
    def inner(self) -> int | None:
        """The size of an inner group of a hierarchical all-reduce, else None."""
        inner = self.begin.kwargs.get("inner")
        return inner if isinstance(inner, int) else None

    @property
    def kind(self) -> Hashable:
        """A key that is equal for all-reduces that may be fused."""
        return self.value.dtype, self.value.device, tuple(sorted(self.begin.kwargs.items()))

    def mark(self, **how: str | int) -> None:
        """Add options to the all-reduce."""
        self.begin.kwargs = {**self.begin.kwargs, **how}

    def give(self, means: fx.Node) -> None:
        """Replace the bucket by `means` in nodes after the all-reduce."""
        for user in list(self.bucket.users):
            if self.end < user:
                user.replace_input_with(self.bucket, means)


def all_reduces_of(graph: fx.Graph) -> list[AllReduce]:
    """The all-reduces of a graph, in the order in which they start."""
    ends = {node.args[1]: node for node in graph.nodes if node.target is REDUCED}
    return [AllReduce(n, ends[n.args[1]]) for n in graph.nodes if n.target is REDUCE]


def members_of(graph: fx.Graph) -> dict[int, tuple[fx.Node, ...]]:
    """The marks of the gradients in each bucket, in their order, by the bucket's number."""
    buckets = {reduction.bucket: reduction.index for reduction in all_reduces_of(graph)}
    found: dict[int, dict[int, fx.Node]] = {}
    for mark in gradients_of(graph):
        place, node = 0, made_by(mark)
        while node not in buckets and is_carried(node):
            if node.target is operator.getitem:
                place = int(str(node.args[1]))
            node = node.all_input_nodes[0]
        if node in buckets:
            found.setdefault(buckets[node], {})[place] = mark
    return {index: tuple(marks[place] for place in sorted(marks)) for index, marks in found.items()}


def is_carried(node: fx.Node) -> bool:
    """Whether a node only moves data, so that it may move with an all-reduce."""
    return is_view(node) or node.target in _CARRIERS
