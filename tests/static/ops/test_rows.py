# SPDX-License-Identifier: Apache-2.0
"""Operations on pulled rows compute what the layers of torch compute."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.ps.layers.devices import as_on_a_gpu
from torch import Tensor

from fleetlight.static.ops import rows as operations
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


KINDS = [("sum", True), ("sum", False), ("mean", False), ("max", False)]
#: bounds of bags of eight places: none is empty, some are, all are
BOUNDS = ([0, 3, 8], [0, 0, 3, 3, 8, 8], [0])


@pytest.mark.parametrize("bounds", BOUNDS, ids=str)
@pytest.mark.parametrize(("mode", "weighed"), KINDS)
@pytest.mark.parametrize("as_on_gpu", [False, True])
def test_bags_equal_embedding_bag(
    as_on_gpu: bool, mode: str, weighed: bool, bounds: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    if as_on_gpu:
        as_on_a_gpu(monkeypatch)
    rows, places = drawn()
    rows.requires_grad_()
    count = bounds[-1]
    each = torch.rand(count, requires_grad=True) if weighed else None
    flat, ends = places.view(8)[:count], torch.tensor(bounds)
    expected = F.embedding_bag(
        flat.long(), rows, ends, mode=mode, per_sample_weights=each, include_last_offset=True
    )
    gradient = torch.randn(expected.shape)
    expected.backward(gradient)  # type: ignore[no-untyped-call]
    given: Any = rows.detach(), flat, ends
    weights = None if each is None else each.detach()
    found, chosen = GATHER_BAGS(*given, weights, mode, torch.float64)
    assert found.dtype == torch.float64
    torch.testing.assert_close(found.float(), expected.detach())
    assert chosen.shape == (found.shape if mode == "max" else (0,))
    assert chosen.dtype == torch.int32
    summed = SUM_BAGS(gradient.double(), *given, weights, mode, chosen)
    torch.testing.assert_close(summed, rows.grad)
    if each is not None:
        torch.testing.assert_close(WEIGH_BAGS(gradient.double(), *given, weights), each.grad)


def test_bags_on_a_gpu_never_reach_a_kernel_of_main_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    as_on_a_gpu(monkeypatch)

    def refused(*given: Any) -> Any:
        raise AssertionError("copied to main memory")

    monkeypatch.setattr(operations, "_array", refused)
    monkeypatch.setattr(operations, "_flat", refused)
    rows, places = drawn()
    given: Any = rows, places.view(8), torch.tensor([0, 3, 8])
    found, chosen = GATHER_BAGS(*given, torch.ones(8), "sum", torch.float32)
    SUM_BAGS(found, *given, torch.ones(8), "sum", chosen)
    WEIGH_BAGS(found, *given, torch.ones(8))
    SUM_ROWS([GATHER_ROWS(rows, places, torch.float32)], [places], rows)


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
