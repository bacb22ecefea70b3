# SPDX-License-Identifier: Apache-2.0
"""Scaling gradients inside a model, independent of its inputs and outputs."""

import dataclasses
from typing import Any

import pytest
import torch
from torch import nn

from fleetlight.collective.data_parallel.sink import through_sink, weighted


@dataclasses.dataclass
class TensorAndDict:
    plain: torch.Tensor
    given: dict[str, torch.Tensor]


def scaled(x: torch.Tensor, factor: float) -> tuple[torch.Tensor, nn.Linear]:
    torch.manual_seed(0)
    layer = nn.Linear(3, 2)
    return weighted(layer, (x,), {}, factor), layer


@pytest.mark.parametrize("factor", [0.0, 0.5, 1.0, 3.0])
def test_only_gradients_inside_are_scaled(factor: float) -> None:
    x = torch.randn(4, 3, requires_grad=True)
    (once, inside), (more, inside_more) = scaled(x, 1.0), scaled(x, factor)
    assert torch.equal(once, more)
    [plain] = torch.autograd.grad(once.square().sum(), x, retain_graph=True)
    [same] = torch.autograd.grad(more.square().sum(), x, retain_graph=True)
    # a weight of 0 passes no gradient to earlier models, whose weight is also 0
    torch.testing.assert_close(same, plain * (factor != 0.0))
    once.square().sum().backward()
    more.square().sum().backward()
    assert inside.weight.grad is not None
    torch.testing.assert_close(inside_more.weight.grad, factor * inside.weight.grad)


@pytest.mark.parametrize("value", ["argument", "keyword", "dataclass"])
def test_inputs_of_any_structure_are_supported(value: str) -> None:
    x = torch.randn(3, requires_grad=True)
    calls: dict[str, Any] = {
        "argument": ([x], {}),
        "keyword": ([], {"x": [x]}),
        "dataclass": ([TensorAndDict(torch.ones(3), {"x": x})], {}),
    }

    def forward(given: Any = None, x: Any = None) -> torch.Tensor:
        one = given.given["x"] if isinstance(given, TensorAndDict) else given if x is None else x[0]
        return torch.as_tensor(one * 2)

    weighted(forward, *calls[value], 4.0).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [2.0] * 3


def test_inputs_and_outputs_may_be_changed_in_place() -> None:
    x = torch.ones(3, requires_grad=True)
    output = weighted(lambda a, b: (a.mul_(2), b.mul_(3)), (x * 1, x * 1), {}, 2.0)
    (output[0].add_(1) + output[1].add_(1)).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [5.0] * 3
    through_sink((x * 1, x * 2))[1].add_(1).sum().backward()
    assert x.grad.tolist() == [7.0] * 3
