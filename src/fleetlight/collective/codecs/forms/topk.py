# SPDX-License-Identifier: Apache-2.0
"""The largest values of each parameter, with their places."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from fleetlight.collective.codecs.codec import CodecSegment, Span
from fleetlight.kernels import add_at, all_finite, largest, take_out

#: of a place and of a value
_EACH = 4


class TopK:
    """Sends `ratio` of the values of a span, at least one. A message is places, then values."""

    name = "topk"
    divisible = False
    has_velocity = False

    def __init__(self, ratio: float) -> None:
        self.ratio = ratio

    def message_bytes(self, spans: Sequence[Span]) -> int:
        """As in `Codec`."""
        return 2 * _EACH * sum(sent_of(span, self.ratio) for span in spans)

    def encode(self, values: Tensor, stretch: CodecSegment, message: Tensor) -> None:
        """As in `Codec`. What is not finite is larger than all: it is sent, and nothing is kept."""
        if stretch.owed is not None and all_finite(values.numpy()):
            values = stretch.owed.add_(values)
        places, taken = fields_of(message)
        find_largest(values.numpy(), stretch.spans, self.ratio, places)
        take_out(values.numpy(), places, taken)

    def add(self, message: Tensor, spans: Sequence[Span], total: Tensor) -> None:
        """As in `Codec`."""
        add_at(*fields_of(message), total.numpy())


def sent_of(span: Span, ratio: float) -> int:
    """How many values of a span are sent."""
    # what is left of 1 - 0.999 is not exactly a thousandth
    return max(1, math.ceil(round(ratio * (span.stop - span.start), 6)))


def fields_of(message: Tensor) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """The places and the values of a message."""
    data = message.numpy()
    half = len(data) // 2
    return data[:half].view(np.int32), data[half:].view(np.float32)


def find_largest(
    values: NDArray[np.float32], spans: Sequence[Span], ratio: float, places: NDArray[np.int32]
) -> None:
    """The places of the largest of each span."""
    done = 0
    for span in spans:
        mine = places[done : done + sent_of(span, ratio)]
        largest(values[span.start : span.stop], mine)
        mine += np.int32(span.start)
        done += len(mine)
