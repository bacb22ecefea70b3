# SPDX-License-Identifier: Apache-2.0
"""A codec with predictable results: bfloat16 with error feedback."""

from collections.abc import Sequence

import torch
from torch import Tensor

from fleetlight.collective.codecs.codec import CodecSegment, Span
from fleetlight.collective.codecs.compression import Compression


class Rounding:
    """Sends two bytes per value."""

    name = "rounding"
    has_velocity = False

    def __init__(self, divisible: bool) -> None:
        self.divisible = divisible

    def message_bytes(self, spans: Sequence[Span]) -> int:
        assert spans[0].start == 0
        return 2 * spans[-1].stop

    def encode(self, values: Tensor, segment: CodecSegment, message: Tensor) -> None:
        assert message.numel() == self.message_bytes(segment.spans) == 2 * values.numel()
        if segment.residual is not None:
            values.add_(segment.residual)
        sent = values.bfloat16()
        message.copy_(sent.view(torch.uint8))
        if segment.residual is not None:
            segment.residual.copy_(values - sent.float())
        values.fill_(torch.nan)  # a codec may overwrite the values

    def add(self, message: Tensor, spans: Sequence[Span], total: Tensor) -> None:
        total.add_(message.view(torch.bfloat16).float())


def rounded(divisible: bool = True, error_feedback: bool = True) -> Compression:
    """A compression for all parameters except vectors."""
    return Compression(Rounding(divisible), error_feedback=error_feedback)
