# SPDX-License-Identifier: Apache-2.0
"""Collections whose rows are in arrays of the test instead of on servers."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fleetlight.kernels import dedup
from fleetlight.ps.layers.embedding import TableLayer
from fleetlight.ps.layers.handle import Asked, TableHandle
from fleetlight.ps.plan import InitializerPlan, RulePlan, TablePlan

ROWS = 12


class Tables:
    """The rows of ids 0 to 11 of each table by its number, and the lookups."""

    def __init__(self, dims: Sequence[int]) -> None:
        random = torch.Generator().manual_seed(0)
        self.rows = [torch.randn(ROWS, dim, generator=random).numpy() for dim in dims]
        self.asked: list[list[Asked]] = []
        self.noticed: list[tuple[int, Any]] = []

    def reached(self, table: int, ids: Any) -> None:
        self.noticed.append((table, ids))

    def look_up(self, asked: Sequence[Asked]) -> list[Any]:
        self.asked.append(list(asked))
        found = [(one.table, dedup(one.ids, 2)) for one in asked]
        return [(wanted, self.rows[table][wanted.ids]) for table, wanted in found]


def opened(model: nn.Module) -> Tables:
    """Connect the layers of a model to rows; those with the same `table` share them."""
    layers = [layer for layer in model.modules() if isinstance(layer, TableLayer)]
    names = [layer.table or f"of layer {n}" for n, layer in enumerate(layers)]
    numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
    dims = {name: layer.dim for name, layer in zip(names, layers, strict=True)}
    tables = Tables([dims[name] for name in numbers])
    for name, layer in zip(names, layers, strict=True):
        plan = TablePlan(name, layer.dim, RulePlan("sgd", {}), InitializerPlan("zeros"), 0, 0)
        layer.handle = TableHandle(numbers[name], plan, tables)  # type: ignore[arg-type]
    return tables


def dense(weight: Tensor) -> Tensor:
    """A table's gradient as a matrix."""
    gradient: Any = weight.grad
    matrix = np.zeros((ROWS, weight.shape[1]), np.float32)
    part = None if gradient is None else gradient.merged(2)
    if part is not None:
        matrix[part.ids] = part.gradients
    return torch.from_numpy(matrix)
