# SPDX-License-Identifier: Apache-2.0
"""Buckets of gradients reuse their memory in each run.

They are the largest values of a program. New memory in each run would cost a page fault for every
page, which slows convolutional nets measurably.
"""

from __future__ import annotations

import torch
from torch import Tensor, fx

from fleetlight.static.graph.aliases import base_of
from fleetlight.static.ops.reductions import REDUCE


class BucketMemory:
    """A `cat` that reuses its output memory."""

    def __init__(self) -> None:
        self._memory: Tensor | None = None

    def __call__(self, tensors: list[Tensor], dim: int = 0) -> Tensor:
        if self._memory is None:
            self._memory = torch.cat(tensors, dim)
            return self._memory
        return torch.cat(tensors, dim, out=self._memory)

    def __str__(self) -> str:
        return "bucket"


def is_bucket(node: fx.Node) -> bool:
    """Whether a node concatenates gradients for a reduction."""
    reduced = any(user.target is REDUCE for user in node.users)
    return reduced and node.target is torch.ops.aten.cat.default


def keep_buckets(graph: fx.Graph) -> None:
    """Reuse the memory of all buckets that the graph does not return."""
    returned = {base_of(node) for node in graph.output_node().all_input_nodes}
    for node in graph.nodes:
        if is_bucket(node) and node not in returned:
            node.target = BucketMemory()
