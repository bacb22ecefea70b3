# SPDX-License-Identifier: Apache-2.0
"""Charts: all points are inside the plot, and each curve has its name."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest

from benchmarks import curves


def test_every_curve_is_drawn_and_named() -> None:
    lines = {"one & only": [(0.0, 2.0), (50.0, 1.0)], "other": [(0.0, 2.5), (100.0, 0.1)]}
    text = curves.chart("A <title>", "steps", "loss", lines)
    tree = ElementTree.fromstring(text)
    texts = [element.text for element in tree.iter() if element.tag.endswith("text")]
    assert {"one & only", "other", "A <title>", "steps", "loss"} <= set(texts)
    drawn = re.findall(r'points="([^"]*)"', text)
    assert len(drawn) == 2
    for x, y in (map(float, point.split(",")) for line in drawn for point in line.split()):
        assert curves.LEFT <= x <= curves.WIDTH - curves.RIGHT
        assert curves.TOP <= y <= curves.HEIGHT - curves.BOTTOM


def test_higher_values_are_higher_up() -> None:
    text = curves.chart("", "", "", {"falling": [(0.0, 3.0), (1.0, 1.0)]})
    (line,) = re.findall(r'points="([^"]*)"', text)
    (_, first), (_, last) = (map(float, point.split(",")) for point in line.split())
    assert first < last


@pytest.mark.parametrize(
    ("low", "high", "found"),
    [
        (0.0, 100.0, [0, 20, 40, 60, 80, 100]),
        (0.31, 2.3, [0, 0.5, 1, 1.5, 2, 2.5]),
        (1.0, 1.0, [1.0]),
    ],
    ids=["hundred", "loss", "level"],
)
def test_marks_are_round_and_span_the_values(low: float, high: float, found: list[float]) -> None:
    assert curves.marks(low, high) == found
