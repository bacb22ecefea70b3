# SPDX-License-Identifier: Apache-2.0
"""Fused steps receive each gradient in the memory layout of its parameter."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fleetlight import static
from fleetlight.static.ops.marks import is_dense, laid_out


def test_a_gradient_in_the_right_layout_is_not_copied() -> None:
    parameter = torch.zeros(3, 1, 4)
    for gradient in (torch.rand(3, 1, 4), torch.rand(3, 4, 1).transpose(1, 2)):
        assert laid_out(gradient, parameter) is gradient


def test_a_gradient_in_another_layout_is_copied() -> None:
    parameter, gradient = torch.zeros(3, 4), torch.rand(4, 3).t()
    found = laid_out(gradient, parameter)
    assert found.stride() == parameter.stride()
    assert torch.equal(found, gradient)


def test_dense_layouts_are_recognised() -> None:
    whole = torch.zeros(3, 4)
    assert is_dense(whole)
    assert is_dense(whole.t())
    assert not is_dense(whole[:, :2])
    assert not is_dense(whole[:1].expand(3, 4))


class Odd(nn.Module):
    """Its parameters have layouts that gradients usually have not."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.turned = nn.Parameter(torch.rand(3, 4).double())
        self.sliced = nn.Parameter(torch.rand(3, 8).double()[:, :4])
        self.conv = nn.Conv2d(2, 3, 3).double().to(memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> Tensor:
        rows = self.conv(x).mean((2, 3))
        return nn.functional.linear(rows, self.turned.t().contiguous().tanh()) @ self.sliced.t()


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam, torch.optim.Adagrad])
def test_parameters_of_any_layout_train_as_in_eager_mode(kind: Any) -> None:
    ours, theirs = Odd(), Odd()
    options = {"lr": 0.1, "weight_decay": 0.01}
    groups = [[m.turned, *m.conv.parameters()] for m in (ours, theirs)]
    mine, other = (
        kind([{"params": group}, {"params": [m.sliced]}], **options)
        for group, m in zip(groups, (ours, theirs), strict=True)
    )
    given = {"x": torch.rand(5, 2, 4, 4).double(), "y": torch.rand(5, 3).double()}
    program = static.capture(ours, nn.functional.mse_loss, mine, given)
    # the group with the sliced parameter has no fused step
    assert "_foreach_" in str(program)
    assert "_fused_" in str(program)
    executor = static.Executor()
    for _ in range(4):
        executor.run(program, given)
        other.zero_grad()
        nn.functional.mse_loss(theirs(given["x"]), given["y"]).backward()
        other.step()
    torch.testing.assert_close(ours.state_dict(), theirs.state_dict(), rtol=1e-9, atol=1e-12)
