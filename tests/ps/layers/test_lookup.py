# SPDX-License-Identifier: Apache-2.0
"""Lookups as autograd functions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tests.ps.rows import DIM, Kept, dense, handle
from torch import Tensor, nn

from fleetlight.ps.layers.handle import Visit
from fleetlight.ps.layers.lookup import embed, embed_bags


def visit(*ids: int) -> Visit:
    return handle(Kept()).visit(np.array(ids), True)


def weight(**facts: Any) -> nn.Parameter:
    return nn.Parameter(torch.empty(0, DIM), **facts)


def test_gradients_of_a_repeated_id_add_up() -> None:
    table = weight()
    out = embed(table, visit(3, 1, 3), None, None)
    out.backward(torch.arange(9.0).view(3, 3))
    assert dense(table)[3].tolist() == [6.0, 8.0, 10.0]
    assert dense(table)[1].tolist() == [3.0, 4.0, 5.0]
    assert isinstance(table.grad, Tensor)
    assert table.grad.shape == (0, DIM)


def test_untrained_rows_have_no_gradient() -> None:
    table, seen = weight(), visit(3, 1, 2, 9)
    embed(table, seen, None, seen.wanted.ids != 1).sum().backward()
    assert sorted(np.flatnonzero(dense(table).any(1))) == [2, 3, 9]
    gradient: Any = table.grad
    [part] = gradient.parts
    assert part.starts[-1] == 3
    for server in (0, 1):
        mine = seen.wanted.ids[seen.wanted.slice_of(server)]
        start, stop = part.starts[server : server + 2]
        assert part.ids[start:stop].tolist() == [i for i in mine if i != 1]


def test_gradient_has_the_counts_of_the_lookup() -> None:
    table, seen = weight(), visit(3, 1)
    counts = np.array([2.0, 1.0], np.float32), np.array([1.0, 0.0], np.float32)
    embed_bags(table, None, seen, np.array([0, 2]), "sum", counts).sum().backward()
    gradient: Any = table.grad
    assert gradient.parts[0].shows.tolist() == [2, 1]
    assert gradient.parts[0].clicks.tolist() == [1, 0]


def test_frozen_table_requires_no_gradient() -> None:
    table = weight(requires_grad=False)
    assert not embed(table, visit(1), None, None).requires_grad
    weights = torch.ones(2, requires_grad=True)
    out = embed_bags(table, weights, visit(1, 2), np.array([0, 2]), "sum", None)
    out.sum().backward()
    rows = Kept().rows
    np.testing.assert_allclose(weights.grad, rows[[1, 2]].sum(1), rtol=1e-6)  # type: ignore[arg-type]
    assert table.grad is None


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16, torch.float64])
def test_rows_have_the_dtype_of_the_weight(kind: torch.dtype) -> None:
    table = weight().to(kind)
    table = nn.Parameter(table.detach())
    out = embed(table, visit(1), None, None)
    assert out.dtype == kind
    out.backward(torch.full((1, DIM), 0.5, dtype=kind))
    assert dense(table)[1].tolist() == [0.5] * DIM
