# SPDX-License-Identifier: Apache-2.0
"""SeededRng: its own random numbers, with the global generators unchanged."""

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch

from fleetlight.data.order.seeded_rng import SeededRng

DRAWS: list[Callable[[], object]] = [
    lambda: torch.rand(3).tolist(),
    lambda: np.random.rand(3).tolist(),
    lambda: [random.random() for _ in range(3)],
]


@pytest.mark.parametrize("draw", DRAWS)
def test_numbers_in_the_block_follow_the_seed(draw: Callable[[], object]) -> None:
    drawn = []
    for seed in (2**62, 2**62, 5):
        with SeededRng(seed):
            drawn.append(draw())
    assert drawn[0] == drawn[1] != drawn[2]


@pytest.mark.parametrize("draw", DRAWS)
def test_generators_outside_the_block_are_unchanged(draw: Callable[[], object]) -> None:
    def outside(rng: SeededRng | None) -> object:
        torch.manual_seed(1)
        np.random.seed(1)
        random.seed(1)
        if rng is not None:
            with rng:
                draw()
        return draw()

    rng = SeededRng(3)
    assert outside(None) == outside(rng) == outside(rng)


@pytest.mark.parametrize("draw", DRAWS)
def test_a_second_block_continues(draw: Callable[[], object]) -> None:
    with SeededRng(3):
        twice = [draw(), draw()]
    rng, again = SeededRng(3), []
    for _ in range(2):
        with rng:
            again.append(draw())
        draw()
    assert again == twice


def test_an_error_in_the_block_restores_the_generators() -> None:
    torch.manual_seed(1)
    expected = torch.rand(1)
    torch.manual_seed(1)
    with pytest.raises(KeyError), SeededRng(3):
        raise KeyError
    assert torch.rand(1) == expected
