# SPDX-License-Identifier: Apache-2.0
"""The largest values of each parameter are sent; the rest is the residual."""

import pytest
import torch
from torch import Tensor

from fleetlight.collective.codecs.codec import CodecSegment, Span
from fleetlight.collective.codecs.forms.topk import TopK, sent_of

SPANS = (Span("a", 0, 0, 4), Span("b", 100, 4, 5), Span("c", 7, 5, 10))
VALUES = [1.0, -4, 2, 3, 0.1, 10, 20, -30, 40, 50]
#: half of each parameter, at least one value
HALF = [0, -4, 0, 3, 0.1, 0, 0, -30, 40, 50]


def round_trip(values: list[float], residual: Tensor | None, ratio: float = 0.5) -> Tensor:
    """Encodes the values and returns what decoding gives."""
    codec = TopK(ratio)
    length = codec.message_bytes(SPANS)
    messages = torch.zeros(3, length, dtype=torch.uint8)
    codec.encode(torch.tensor(values), CodecSegment(SPANS, residual), messages[1])
    total = torch.zeros(len(values))
    for message in messages[1:2]:
        codec.add(message, SPANS, total)
    return total


def test_each_parameter_sends_its_largest_values() -> None:
    assert round_trip(VALUES, None).tolist() == pytest.approx(HALF)
    assert TopK(0.5).message_bytes(SPANS) == 8 * (2 + 1 + 3)
    assert TopK(0.5).message_bytes(()) == 0


def test_the_residual_is_sent_once_it_has_grown() -> None:
    residual, total = torch.zeros(10), torch.zeros(10)
    total += round_trip(VALUES, residual)
    assert residual.tolist() == [1, 0, 2, 0, 0, 10, 20, 0, 0, 0]
    for _ in range(3):
        total += round_trip([1.0] * 10, residual)
    torch.testing.assert_close(total + residual, torch.tensor(VALUES) + 3)
    assert (total[[0, 2, 5, 6]] != 0).all()


def test_a_ratio_of_one_sends_everything() -> None:
    residual = torch.ones(10)
    assert round_trip(VALUES, residual, 1.0).tolist() == pytest.approx([v + 1 for v in VALUES])
    assert residual.tolist() == [0] * 10


@pytest.mark.parametrize(
    ("ratio", "count", "expected"),
    [(0.01, 1, 1), (0.01, 100, 1), (0.01, 101, 2), (1 - 0.999, 1_000_000, 1000), (1.0, 7, 7)],
)
def test_the_ratio_decides_how_many_values_are_sent(
    ratio: float, count: int, expected: int
) -> None:
    assert sent_of(Span("a", 3, 20, 20 + count), ratio) == expected


@pytest.mark.parametrize("bad", [float("nan"), float("inf")], ids=str)
def test_non_finite_values_are_sent_and_leave_no_residual(bad: float) -> None:
    residual = torch.full((10,), 5.0)
    got = round_trip([bad, bad, bad, 1.0, *VALUES[4:]], residual)
    assert got.isfinite().tolist() == [False] * 2 + [True] * 8
    assert residual.tolist() == [5] * 10
