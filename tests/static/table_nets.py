# SPDX-License-Identifier: Apache-2.0
"""Nets with tables, and their programs without servers."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import fleetlight as fleet
from fleetlight import static
from fleetlight.static.graph.form import Form
from fleetlight.static.writing.recorder import Part
from fleetlight.static.writing.source import ProgramSource


class Fields(nn.Module):
    """One layer per field over a shared table, and a bag over all fields."""

    def __init__(self, fields: int = 3, dim: int = 4) -> None:
        super().__init__()
        self.wide = fleet.nn.SparseEmbeddingBag(1, "sum", initializer="zeros")
        self.deep = nn.ModuleList(
            fleet.nn.SparseEmbedding(dim, table="deep") for _ in range(fields)
        )
        self.linear = nn.Linear(fields * dim, 1)

    def forward(self, ids: Tensor) -> Tensor:
        rows = [layer(ids[:, n]) for n, layer in enumerate(self.deep)]
        return self.wide(ids) + self.linear(torch.cat(rows, 1))


class GradientsOnly:
    """Replaces a job with servers: the program computes gradients and makes no step."""

    def register(self, program: static.Program) -> tuple[Part, ...]:
        return "forward", "backward"

    def distribute(self, program: static.Program) -> None:
        pass


def written(model: nn.Module, **shapes: Any) -> static.Program:
    """A program with gradients, whose feeds are whole numbers."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.distributor = GradientsOnly()  # type: ignore[attr-defined]
    inputs = {name: torch.zeros(shape, dtype=torch.int64) for name, shape in shapes.items()}
    return static.capture(model, lambda out: out.sum(), optimizer, inputs)


def calls(form: Form) -> list[str]:
    """The names of a form's operations."""
    return [str(n.target).removesuffix(".default") for n in form.graph.nodes]


def source_of(program: static.Program) -> ProgramSource:
    assert program.source is not None
    return program.source


class ComputedIds(nn.Module):
    """Looks up ids that a function computes."""

    def __init__(self, ids_of: Callable[[Any, Tensor], Tensor], **more: Any) -> None:
        super().__init__()
        self.emb = fleet.nn.SparseEmbedding(2)
        self.other = fleet.nn.SparseEmbedding(2)
        self.gate = nn.Parameter(torch.ones(3))
        self.register_buffer("offsets", torch.tensor([0, 100, 200]))
        self.ids_of = ids_of

    def forward(self, x: Tensor) -> Tensor:
        return self.emb(self.ids_of(self, x)).sum() + self.gate.sum()
