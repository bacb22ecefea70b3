# SPDX-License-Identifier: Apache-2.0
"""The reductions in a graph: where each begins, and where its bucket is back."""

from __future__ import annotations

import dataclasses
import operator

import torch
from torch import Tensor, fx

from fleetlight.static.graph.aliases import is_view
from fleetlight.static.graph.reductions import REDUCE, REDUCED

#: compute nothing
_CARRIERS = (
    operator.getitem,
    torch.ops.aten.cat.default,
    torch.ops.aten.clone.default,
    torch.ops.aten._to_copy.default,
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

    def give(self, means: fx.Node) -> None:
        """Have whoever uses the bucket when it is back use something else in its place."""
        for user in list(self.bucket.users):
            if self.end < user:
                user.replace_input_with(self.bucket, means)


def all_reduces_of(graph: fx.Graph) -> list[AllReduce]:
    """In the order in which they begin."""
    ends = {node.args[1]: node for node in graph.nodes if node.target is REDUCED}
    return [AllReduce(n, ends[n.args[1]]) for n in graph.nodes if n.target is REDUCE]


def is_carried(node: fx.Node) -> bool:
    """Whether a node only brings numbers to where they are needed, so that it can be moved."""
    return is_view(node) or node.target in _CARRIERS
