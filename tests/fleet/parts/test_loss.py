# SPDX-License-Identifier: Apache-2.0
"""The stand-in for backward: it sees losses, changes nothing, and goes away."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from fleetlight.fleet.parts.loss import SeenLoss

BACKWARD = torch.Tensor.backward


@pytest.fixture
def seen() -> Iterator[SeenLoss]:
    seen = SeenLoss()
    yield seen
    seen.close()
    torch.Tensor.backward = BACKWARD  # type: ignore[method-assign]


def test_it_keeps_the_last_loss_without_its_graph(seen: SeenLoss) -> None:
    x = torch.ones(3, requires_grad=True)
    for factor in (1.0, 2.0):
        (x.sum() * factor).backward()
    assert seen.value is not None
    assert (float(seen.value), seen.value.requires_grad, seen.number) == (6.0, False, 2)
    assert x.grad is not None
    assert x.grad.tolist() == [3.0] * 3


def test_what_is_not_one_number_is_no_loss(seen: SeenLoss) -> None:
    x = torch.ones(3, requires_grad=True)
    (2 * x).backward(torch.ones(3), retain_graph=True)
    assert (seen.value, seen.number) == (None, 0)
    assert x.grad is not None


def test_closed_it_is_gone(seen: SeenLoss) -> None:
    assert torch.Tensor.backward is not BACKWARD
    seen.close()
    assert torch.Tensor.backward is BACKWARD
    seen.close()


def test_who_stands_in_for_it_stays_and_nothing_is_seen_through_them(seen: SeenLoss) -> None:
    stand_in, calls = torch.Tensor.backward, []

    def other(loss: torch.Tensor) -> None:
        calls.append(loss)
        stand_in(loss)

    torch.Tensor.backward = other  # type: ignore[assignment, method-assign]
    seen.close()
    assert torch.Tensor.backward is other
    torch.ones(1, requires_grad=True).sum().backward()
    assert (len(calls), seen.number, seen.value) == (1, 0, None)
