# SPDX-License-Identifier: Apache-2.0
"""Tensors in one buffer and back, in the order of their memory."""

from __future__ import annotations

import pytest
import torch

from fleetlight.collective.flattening import flat_of, spread

WAYS = {
    "contiguous": lambda: torch.randn(2, 3, 4, 5),
    "channels_last": lambda: torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "transposed": lambda: torch.randn(4, 3).t(),
    "scalar": lambda: torch.randn(()),
}


@pytest.mark.parametrize("way", WAYS)
def test_values_lie_as_in_memory_and_come_back(way: str) -> None:
    tensor, other = WAYS[way](), torch.randn(3)
    flat = flat_of([tensor, other], [tensor, other])
    memory = torch.as_strided(tensor, (tensor.numel(),), (1,))
    assert torch.equal(flat[:-3], memory)
    assert torch.equal(flat[-3:], other)
    expected = (tensor * 2, other * 2)
    spread(flat.mul(2), [tensor, other], [tensor, other])
    assert torch.equal(tensor, expected[0])
    assert torch.equal(other, expected[1])


def test_a_gradient_lies_as_its_parameter_does() -> None:
    parameter = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    gradient = parameter.contiguous()
    flat = flat_of([gradient], [parameter])
    assert torch.equal(flat, torch.as_strided(parameter, (parameter.numel(),), (1,)))
    spread(flat.mul(2), [gradient], [parameter])
    assert torch.equal(gradient, parameter * 2)
