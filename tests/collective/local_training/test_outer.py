# SPDX-License-Identifier: Apache-2.0
"""Outer steps: the mean of the parameters, or the Nesterov step of torch."""

import pytest
import torch
from torch import Tensor, nn

from fleetlight.collective.local_training.outer import NesterovMomentum, PlainMean


def drawn(seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).double() for shape in [(3, 4), (5,)]]


def test_the_mean_movement_gives_the_mean_of_the_models() -> None:
    start, models = drawn(0), [drawn(1), drawn(2)]
    moved = [
        torch.stack([s - e for e in each]).mean(0) for s, *each in zip(start, *models, strict=True)
    ]
    PlainMean().step(start, start, moved)
    for mine, *each in zip(start, *models, strict=True):
        torch.testing.assert_close(mine, torch.stack(each).mean(0), rtol=0, atol=1e-15)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_nesterov_equals_that_of_torch(momentum: float) -> None:
    parameters = [nn.Parameter(one.clone()) for one in drawn(0)]
    outer = torch.optim.SGD(parameters, lr=0.7, momentum=momentum, nesterov=bool(momentum))
    start, mine = drawn(0), NesterovMomentum(0.7, momentum)
    for seed in range(1, 5):
        for parameter, gradient in zip(parameters, drawn(seed), strict=True):
            parameter.grad = gradient
        outer.step()
        mine.step(list(parameters), start, drawn(seed))
        assert all(torch.equal(a, b) for a, b in zip(start, parameters, strict=True))


def test_a_loaded_momentum_continues_by_name() -> None:
    first = [nn.Parameter(one) for one in drawn(0)]
    names = dict(zip(first, ["a", "b"], strict=True))
    one, two = NesterovMomentum(0.7, 0.9), NesterovMomentum(0.7, 0.9)
    one.step(list(first), drawn(0), drawn(1))
    state = {name: tensor.clone() for name, tensor in one.state(names).items()}
    assert list(state) == ["a", "b"]
    second = [nn.Parameter(one) for one in drawn(0)]
    two.load(state, dict(zip(second, ["a", "b"], strict=True)))
    models = [drawn(2), drawn(2)]
    one.step(list(first), models[0], drawn(3))
    two.step(list(second), models[1], drawn(3))
    assert all(torch.equal(a, b) for a, b in zip(*models, strict=True))
    # loaded values are copies, and unknown parameters start at zero
    assert not torch.equal(state["a"], one.state(names)["a"])
    two.load({}, {})
    assert two.state(names) == {}
