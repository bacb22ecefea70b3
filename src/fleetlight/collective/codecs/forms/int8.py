# SPDX-License-Identifier: Apache-2.0
"""One byte for each value, and a scale for each block of values."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from fleetlight.collective.codecs.codec import CodecRecord, CodecSegment, Span
from fleetlight.kernels import add_blocks, block_count, to_blocks
from fleetlight.strategy import CompressionConfigs

_Message = tuple[NDArray[np.float32], NDArray[np.int8]]


class Int8:
    """The largest value of a block is 127 or -127. A message is the scales, then the values."""

    name = "int8"
    divisible = True
    has_velocity = False

    def message_bytes(self, spans: Sequence[Span]) -> int:
        """As in `Codec`; a multiple of four, since messages follow one another in memory."""
        count = spans[-1].stop if spans else 0
        return 4 * block_count(count) + -(-count // 4) * 4

    def encode(self, values: Tensor, segment: CodecSegment, message: Tensor) -> None:
        """As in `Codec`. A block with a NaN or infinity arrives as NaN and keeps its residual."""
        residual = None if segment.residual is None else segment.residual.numpy()
        to_blocks(values.numpy(), residual, *_fields(message, values.numel()))

    def add(self, message: Tensor, spans: Sequence[Span], total: Tensor) -> None:
        """As in `Codec`."""
        add_blocks(*_fields(message, total.numel()), total.numpy())


def _fields(message: Tensor, count: int) -> _Message:
    data, scales = message.numpy(), 4 * block_count(count)
    return data[:scales].view(np.float32), data[scales : scales + count].view(np.int8)


def _make(configs: CompressionConfigs) -> Int8:
    return Int8()


RECORD = CodecRecord("int8", _make)
