# SPDX-License-Identifier: Apache-2.0
"""Layers whose rows are in an array of the test instead of on servers."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fleetlight.kernels import Deduped, dedup
from fleetlight.ps.layers.embedding import TableLayer
from fleetlight.ps.layers.handle import Asked, TableHandle
from fleetlight.ps.layers.table_gradient import TableGradient
from fleetlight.ps.plan import InitializerPlan, RulePlan, TablePlan

ROWS, DIM = 10, 3


class Kept:
    """Stores the rows of ids 0 to 9, and records lookups."""

    def __init__(self, rows: int = ROWS, dim: int = DIM) -> None:
        self.rows = torch.randn(rows, dim, generator=torch.Generator().manual_seed(0)).numpy()
        self.asked: list[tuple[int, list[int], bool]] = []
        self.noticed: list[Any] = []
        self.reached: Callable[[int, Any], None] | None = lambda _, ids: self.noticed.append(ids)

    def look_up(self, asked: Sequence[Asked]) -> list[tuple[Deduped, Any]]:
        found = []
        for table, ids, insert in asked:
            wanted = dedup(ids, 2)
            self.asked.append((table, sorted(wanted.ids.tolist()), insert))
            found.append((wanted, self.rows[wanted.ids]))
        return found


def handle(kept: Kept, rows: int = 0) -> TableHandle:
    """The handle of table 4."""
    plan = TablePlan("emb", DIM, RulePlan("sgd", {}), InitializerPlan("zeros"), 0, 0, rows=rows)
    return TableHandle(4, plan, kept)


def opened(layer: TableLayer) -> tuple[TableLayer, Kept]:
    """Connect a layer to its rows."""
    kept = Kept()
    layer.handle = handle(kept)
    return layer, kept


def dense(weight: Tensor) -> Tensor:
    """A table's gradient as a matrix."""
    gradient = weight.grad
    assert isinstance(gradient, TableGradient)
    matrix = np.zeros((ROWS, DIM), np.float32)
    part = gradient.merged(2)
    if part is not None:
        assert len(set(part.ids.tolist())) == len(part.ids)
        matrix[part.ids] = part.gradients
    return torch.from_numpy(matrix)
