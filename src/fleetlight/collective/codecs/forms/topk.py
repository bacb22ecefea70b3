# SPDX-License-Identifier: Apache-2.0
"""Sparsification: the largest values of each parameter, with their indices."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from fleetlight.collective.codecs.codec import CodecRecord, CodecSegment, Span
from fleetlight.kernels import add_at, all_finite, largest, take_out
from fleetlight.strategy import CompressionConfigs

#: of an index and of a value
_BYTES = 4


class TopK:
    """Sends `ratio` of the values of a span, at least one. A message is indices, then values."""

    name = "topk"
    divisible = False
    has_velocity = False

    def __init__(self, ratio: float) -> None:
        self.ratio = ratio

    def message_bytes(self, spans: Sequence[Span]) -> int:
        """As in `Codec`."""
        return 2 * _BYTES * sum(sent_of(span, self.ratio) for span in spans)

    def encode(self, values: Tensor, segment: CodecSegment, message: Tensor) -> None:
        """As in `Codec`. Values that are not finite count as largest; then no residual changes."""
        if segment.residual is not None and all_finite(values.numpy()):
            values = segment.residual.add_(values)
        indices, taken = fields_of(message)
        find_largest(values.numpy(), segment.spans, self.ratio, indices)
        take_out(values.numpy(), indices, taken)

    def add(self, message: Tensor, spans: Sequence[Span], total: Tensor) -> None:
        """As in `Codec`."""
        add_at(*fields_of(message), total.numpy())


def sent_of(span: Span, ratio: float) -> int:
    """The number of values of a span that are sent."""
    # 1 - 0.999 is not exactly a thousandth
    return max(1, math.ceil(round(ratio * (span.stop - span.start), 6)))


def fields_of(message: Tensor) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """The indices and the values of a message."""
    data = message.numpy()
    half = len(data) // 2
    return data[:half].view(np.int32), data[half:].view(np.float32)


def find_largest(
    values: NDArray[np.float32], spans: Sequence[Span], ratio: float, indices: NDArray[np.int32]
) -> None:
    """Write the indices of the largest values of each span."""
    done = 0
    for span in spans:
        mine = indices[done : done + sent_of(span, ratio)]
        largest(values[span.start : span.stop], mine)
        mine += np.int32(span.start)
        done += len(mine)


def _make(configs: CompressionConfigs) -> TopK:
    return TopK(configs.ratio)


RECORD = CodecRecord("topk", _make)
