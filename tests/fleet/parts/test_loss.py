# SPDX-License-Identifier: Apache-2.0
"""The loss of the last backward is kept without its graph."""

from collections.abc import Iterator

import pytest
import torch

from fleetlight.fleet.parts.loss import LossProbe
from fleetlight.torch_compat.used_graphs import watch_no_longer


@pytest.fixture
def seen() -> Iterator[LossProbe]:
    seen = LossProbe()
    yield seen
    seen.close()
    watch_no_longer()


def test_last_loss_is_kept_without_its_graph(seen: LossProbe) -> None:
    x = torch.ones(3, requires_grad=True)
    for factor in (1.0, 2.0):
        (x.sum() * factor).backward()
    assert seen.value is not None
    assert (float(seen.value), seen.value.requires_grad, seen.number) == (6.0, False, 2)
    assert x.grad is not None
    assert x.grad.tolist() == [3.0] * 3


def test_tensor_of_several_numbers_is_no_loss(seen: LossProbe) -> None:
    x = torch.ones(3, requires_grad=True)
    (2 * x).backward(torch.ones(3), retain_graph=True)
    assert (seen.value, seen.number) == (None, 0)
    assert x.grad is not None


def test_closed_watcher_records_no_loss(seen: LossProbe) -> None:
    seen.close()
    seen.close()
    torch.ones(1, requires_grad=True).sum().backward()
    assert (seen.value, seen.number) == (None, 0)
