# SPDX-License-Identifier: Apache-2.0
"""The graph of a loss shows whether its backward has run, for every kind of operation."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from fleetlight.torch_compat.used_graphs import is_older, is_used, nodes_so_far

pytestmark = pytest.mark.contract

#: torch 2.9 reveals a saved tensor only by unpacking it
HAS_SAVED_DATA = hasattr(torch._C._autograd.SavedTensor, "data")
X, Y = torch.randn(5, 3), torch.zeros(5, dtype=torch.long)
NET = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
COMPUTED: list[int] = []


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 2


class DoubledWithoutState(Doubled):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2


def counted(x: Tensor) -> Tensor:
    COMPUTED.append(1)
    return NET(x)


def checkpointed(reentrant: bool) -> Tensor:
    out = checkpoint(counted, X.clone().requires_grad_(), use_reentrant=reentrant)
    assert isinstance(out, Tensor)
    return out.sum()


def on_cpu() -> Tensor:
    with torch.autograd.graph.save_on_cpu():
        return F.cross_entropy(NET(X), Y)


def narrow() -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return F.cross_entropy(NET(X), Y)


LOSSES: dict[str, Callable[[], Tensor]] = {
    "cross entropy": lambda: F.cross_entropy(NET(X), Y),
    "sum": lambda: NET(X).sum(),
    "list of tensors": lambda: torch.stack([p.norm() for p in NET.parameters()]).norm(),
    "function": lambda: Doubled.apply(NET(X)).sum(),  # type: ignore[no-untyped-call]
    "function without state": lambda: DoubledWithoutState.apply(NET(X)).sum(),  # type: ignore[no-untyped-call]
    "recomputed": lambda: checkpointed(False),
    "recomputed, reentrant": lambda: checkpointed(True),
    "lstm": lambda: nn.LSTM(3, 4)(X[None])[0].sum(),
    "saved elsewhere": on_cpu,
    "autocast": narrow,
}


@pytest.mark.parametrize("loss_of", LOSSES.values(), ids=LOSSES)
def test_a_graph_after_its_backward_is_used(loss_of: Callable[[], Tensor]) -> None:
    loss = loss_of()
    COMPUTED.clear()
    assert not is_used(loss)
    assert not (HAS_SAVED_DATA and COMPUTED)  # checking recomputes nothing
    loss.backward(retain_graph=True)
    assert not is_used(loss)
    loss.backward()
    COMPUTED.clear()
    assert is_used(loss)
    assert not (HAS_SAVED_DATA and COMPUTED)


def test_a_graph_without_saved_tensors_counts_as_unused() -> None:
    loss = NET[0].bias.sum()
    loss.backward()
    assert not is_used(loss)
    assert not is_used(torch.zeros((), requires_grad=True))


def test_a_loss_is_older_than_later_nodes() -> None:
    before = nodes_so_far()
    loss = NET(X).sum()
    assert not is_older(loss, before)
    assert is_older(loss, nodes_so_far())
