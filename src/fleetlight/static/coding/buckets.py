# SPDX-License-Identifier: Apache-2.0
"""Buckets of gradients keep their memory from run to run.

They are the largest values of a program. Memory that is new in each run costs the system's work for
every page of it, which a net of convolutions feels.
"""

from __future__ import annotations

import torch
from torch import Tensor, fx

from fleetlight.static.graph.aliases import base_of
from fleetlight.static.ops.reductions import REDUCE


class BucketMemory:
    """In place of a `cat`: makes the same tensor, in the same memory each time."""

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
    """Whether a node puts gradients together so that they are reduced."""
    reduced = any(user.target is REDUCE for user in node.users)
    return reduced and node.target is torch.ops.aten.cat.default


def keep_buckets(graph: fx.Graph) -> None:
    """Those of which no caller gets anything."""
    answered = {base_of(node) for node in graph.output_node().all_input_nodes}
    for node in graph.nodes:
        if is_bucket(node) and node not in answered:
            node.target = BucketMemory()
