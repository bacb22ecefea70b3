# SPDX-License-Identifier: Apache-2.0
"""Int8 messages: decoded values, residual and length."""

import pytest
import torch
from torch import Tensor

from fleetlight.collective.codecs.codec import CodecSegment, Span
from fleetlight.collective.codecs.forms.int8 import Int8

CODEC = Int8()


def spans_of(count: int) -> tuple[Span, ...]:
    return (Span("a", 0, 0, count // 2), Span("b", 5, count // 2, count))


def values_of(count: int, seed: int = 0) -> Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(seed))


def encoded(values: Tensor, residual: Tensor | None = None) -> Tensor:
    """A message at the address of the second of two adjacent messages."""
    spans = spans_of(len(values))
    length = CODEC.message_bytes(spans)
    messages = torch.zeros(2, length, dtype=torch.uint8)
    CODEC.encode(values.clone(), CodecSegment(spans, residual), messages[1])
    return messages[1]


def decoded(message: Tensor, count: int) -> Tensor:
    total = torch.ones(count)
    CODEC.add(message, spans_of(count), total)
    return total - 1


@pytest.mark.sampled(6)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("count", "length"), [(1, 8), (4, 8), (255, 260), (256, 260), (257, 268), (5000, 5080)]
)
def test_a_message_has_one_byte_per_value(count: int, length: int) -> None:
    assert CODEC.message_bytes(spans_of(count)) == length
    values = values_of(count)
    got = decoded(encoded(values), count)
    steps = values.abs().max() / 127
    torch.testing.assert_close(got, values, rtol=0, atol=float(0.51 * steps))
    assert CODEC.message_bytes(()) == 0


def test_the_residual_is_sent_later() -> None:
    residual, total = torch.zeros(700), torch.zeros(700)
    for step in range(5):
        total += decoded(encoded(values_of(700, step), residual), 700)
    expected = torch.stack([values_of(700, step) for step in range(5)]).sum(0)
    assert residual.abs().max() > 1e-3
    torch.testing.assert_close(total + residual, expected, rtol=0, atol=1e-5)


def test_messages_are_summed() -> None:
    one, other = (encoded(values_of(300, seed)) for seed in range(2))
    total = torch.zeros(300)
    for message in (one, other):
        CODEC.add(message, spans_of(300), total)
    torch.testing.assert_close(total, decoded(one, 300) + decoded(other, 300))


def test_a_nan_is_sent_and_leaves_the_residual() -> None:
    values, residual = values_of(600), values_of(600, 1)
    values[10] = float("nan")
    before = residual.clone()
    got = decoded(encoded(values, residual), 600)
    assert got.isnan().tolist() == [n < 256 for n in range(600)]
    assert torch.equal(residual[:256], before[:256])
    assert residual.isfinite().all()
