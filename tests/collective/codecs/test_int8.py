# SPDX-License-Identifier: Apache-2.0
"""Messages of bytes: what arrives, the residual, and how long they are."""

from __future__ import annotations

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


def sent(values: Tensor, residual: Tensor | None = None) -> Tensor:
    """A message at an address as those have that lie one behind the other."""
    spans = spans_of(len(values))
    length = CODEC.message_bytes(spans)
    messages = torch.zeros(2, length, dtype=torch.uint8)
    CODEC.encode(values.clone(), CodecSegment(spans, residual), messages[1])
    return messages[1]


def arrived(message: Tensor, count: int) -> Tensor:
    total = torch.ones(count)
    CODEC.add(message, spans_of(count), total)
    return total - 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("count", "length"), [(1, 8), (4, 8), (255, 260), (256, 260), (257, 268), (5000, 5080)]
)
def test_a_message_has_a_byte_for_each_value(count: int, length: int) -> None:
    assert CODEC.message_bytes(spans_of(count)) == length
    values = values_of(count)
    got = arrived(sent(values), count)
    steps = values.abs().max() / 127
    torch.testing.assert_close(got, values, rtol=0, atol=float(0.51 * steps))
    assert CODEC.message_bytes(()) == 0


def test_what_is_owed_is_sent_later() -> None:
    residual, total = torch.zeros(700), torch.zeros(700)
    for step in range(5):
        total += arrived(sent(values_of(700, step), residual), 700)
    meant = torch.stack([values_of(700, step) for step in range(5)]).sum(0)
    assert residual.abs().max() > 1e-3
    torch.testing.assert_close(total + residual, meant, rtol=0, atol=1e-5)


def test_messages_are_added_up() -> None:
    one, other = (sent(values_of(300, seed)) for seed in range(2))
    total = torch.zeros(300)
    for message in (one, other):
        CODEC.add(message, spans_of(300), total)
    torch.testing.assert_close(total, arrived(one, 300) + arrived(other, 300))


def test_a_nan_arrives_and_leaves_what_is_owed() -> None:
    values, residual = values_of(600), values_of(600, 1)
    values[10] = float("nan")
    before = residual.clone()
    got = arrived(sent(values, residual), 600)
    assert got.isnan().tolist() == [n < 256 for n in range(600)]
    assert torch.equal(residual[:256], before[:256])
    assert residual.isfinite().all()
