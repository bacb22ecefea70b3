# SPDX-License-Identifier: Apache-2.0
"""Operations on pulled rows compute what the layers of torch compute."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fleetlight.static.ops.rows import GATHER_BAGS, GATHER_ROWS, SUM_BAGS, SUM_ROWS, WEIGH_BAGS


def drawn() -> tuple[Tensor, Tensor]:
    """Rows, and the positions of a batch among them."""
    torch.manual_seed(0)
    return torch.randn(5, 3), torch.randint(0, 5, (4, 2), dtype=torch.int32)


def test_rows_are_gathered_and_gradients_summed() -> None:
    rows, places = drawn()
    rows.requires_grad_()
    expected = F.embedding(places.long(), rows)
    found = GATHER_ROWS(rows.detach(), places, torch.float64)
    assert found.dtype == torch.float64
    torch.testing.assert_close(found.float(), expected.detach())
    gradient = torch.randn(4, 2, 3)
    (2 * expected * gradient).sum().backward()  # type: ignore[no-untyped-call]
    # several lookups together, of any shape and type
    summed = SUM_ROWS([gradient.double(), gradient.view(8, 3)], [places, places.view(8)], rows)
    torch.testing.assert_close(summed, rows.grad)


@pytest.mark.parametrize(("mode", "weighed"), [("sum", True), ("sum", False), ("mean", False)])
def test_bags_equal_embedding_bag(mode: str, weighed: bool) -> None:
    check_bags(mode, weighed)


def test_maxima_of_bags_equal_embedding_bag() -> None:
    check_bags("max", False)


def check_bags(mode: str, weighed: bool) -> None:
    rows, places = drawn()
    rows.requires_grad_()
    each = torch.rand(8, requires_grad=True) if weighed else None
    flat, bounds = places.view(8), torch.tensor([0, 3, 3, 8])
    expected = F.embedding_bag(
        flat.long(),
        rows,
        bounds,
        mode=mode,
        per_sample_weights=each,
        include_last_offset=True,
    )
    gradient = torch.randn(3, 3)
    expected.backward(gradient)  # type: ignore[no-untyped-call]
    given: Any = rows.detach(), flat, bounds
    weights = None if each is None else each.detach()
    found, chosen = GATHER_BAGS(*given, weights, mode, torch.float32)
    torch.testing.assert_close(found, expected.detach())
    torch.testing.assert_close(SUM_BAGS(gradient, *given, weights, mode, chosen), rows.grad)
    if each is not None:
        torch.testing.assert_close(WEIGH_BAGS(gradient, *given, weights), each.grad)


def test_operations_support_fake_tensors() -> None:
    rows, places = drawn()
    bounds, each = torch.tensor([0, 3, 8]), torch.rand(8)
    flat, gradient = places.view(8), torch.randn(2, 3)
    for op, args in (
        (GATHER_ROWS, (rows, places, torch.float32)),
        (SUM_ROWS, ([torch.randn(4, 2, 3)], [places], rows)),
        (GATHER_BAGS, (rows, flat, bounds, each, "sum", torch.float32)),
        (GATHER_BAGS, (rows, flat, bounds, None, "max", torch.float32)),
        (SUM_BAGS, (gradient, rows, flat, bounds, each, "sum", torch.empty(0))),
        (WEIGH_BAGS, (gradient, rows, flat, bounds, each)),
    ):
        torch.library.opcheck(op, args, test_utils=("test_schema", "test_faketensor"))
