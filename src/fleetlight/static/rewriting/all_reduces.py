# SPDX-License-Identifier: Apache-2.0
"""The reductions in a graph: where each begins, and where its bucket is back."""

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

#: compute nothing
_CARRIERS = (
    operator.getitem,
    torch.ops.aten.cat.default,
    torch.ops.aten.clone.default,
    CAST,
)


@dataclasses.dataclass(frozen=True)
class AllReduce:
    """One of them."""

    begin: fx.Node
    end: fx.Node

    @property
    def bucket(self) -> fx.Node:
        """What is reduced, in place."""
        bucket = self.begin.args[0]
        assert isinstance(bucket, fx.Node)
        return bucket

    @property
    def value(self) -> Tensor:
        """The bucket as a tensor without values."""
        value: Tensor = self.bucket.meta["val"]
        return value

    @property
    def bytes(self) -> int:
        """How much travels."""
        return self.value.numel() * self.value.element_size()

    @property
    def index(self) -> int:
        """Its number."""
        index = self.begin.args[1]
        assert isinstance(index, int)
        return index

    @property
    def is_coded(self) -> bool:
        """Whether it may travel in another form."""
        return self.begin.kwargs.get("codec") is not None

    @property
    def inner(self) -> int | None:
        """How many workers form an inner group, where it goes by levels."""
        inner = self.begin.kwargs.get("inner")
        return inner if isinstance(inner, int) else None

    @property
    def kind(self) -> Hashable:
        """What buckets have in common that may be one."""
        return self.value.dtype, self.value.device, tuple(sorted(self.begin.kwargs.items()))

    def mark(self, **how: str | int) -> None:
        """Say how it travels, beside what it says already."""
        self.begin.kwargs = {**self.begin.kwargs, **how}

    def give(self, means: fx.Node) -> None:
        """Have whoever uses the bucket when it is back use something else in its place."""
        for user in list(self.bucket.users):
            if self.end < user:
                user.replace_input_with(self.bucket, means)


def all_reduces_of(graph: fx.Graph) -> list[AllReduce]:
    """In the order in which they begin."""
    ends = {node.args[1]: node for node in graph.nodes if node.target is REDUCED}
    return [AllReduce(n, ends[n.args[1]]) for n in graph.nodes if n.target is REDUCE]


def members_of(graph: fx.Graph) -> dict[int, tuple[fx.Node, ...]]:
    """The marks of the gradients that come back in each bucket, in their order, by its number."""
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
    """Whether a node only brings numbers to where they are needed, so that it can be moved."""
    return is_view(node) or node.target in _CARRIERS
