# SPDX-License-Identifier: Apache-2.0
"""The sparsity of each step."""

import pytest

from fleetlight.collective.codecs.dgc import Sparsity
from fleetlight.errors import StrategyError


@pytest.mark.parametrize(
    ("begin", "steps", "levels", "expected"),
    [
        (0, 1, [0.9], [0.9, 0.9, 0.9]),
        (2, 1, [0.9], [None, None, 0.9, 0.9]),
        (0, 1, [0.5, 0.9], [0.5, 0.9, 0.9]),
        (1, 4, [0.5, 0.9], [None, 0.5, 0.5, 0.9, 0.9, 0.9]),
        (0, 5, [0.0, 0.5, 0.9], [0.0, 0.0, 0.5, 0.5, 0.9, 0.9]),
        (0, 2, [0.1, 0.2, 0.3, 0.4], [0.1, 0.3, 0.4]),
    ],
    ids=["at_once", "later", "two", "two_later", "uneven", "more_than_steps"],
)
def test_sparsity_rises_through_the_levels(
    begin: int, steps: int, levels: list[float], expected: list[float | None]
) -> None:
    sparsity = Sparsity(begin, steps, levels)
    assert [sparsity.at(step) for step in range(len(expected))] == expected
    assert sparsity.at(10**6) == levels[-1]


@pytest.mark.parametrize("levels", [[], [0.9, 0.5], [-0.1], [0.5, 1.0], [float("nan")]], ids=str)
def test_levels_must_rise_from_0_to_below_1(levels: list[float]) -> None:
    with pytest.raises(StrategyError, match=r"dgc_configs\.sparsity: got \[.*expected at least"):
        Sparsity(0, 1, levels)
