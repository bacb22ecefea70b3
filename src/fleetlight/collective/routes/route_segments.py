# SPDX-License-Identifier: Apache-2.0
"""Segments of buckets as codecs see them: whose values, and what the sender keeps of them."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from fleetlight.collective.buckets import ParameterSlice
from fleetlight.collective.codecs.codec import CodecSegment, Span
from fleetlight.collective.codecs.compression import Compression

#: kinds of `ErrorFeedback`: the residuals of gradients, the residuals of sums, and momentum. The
#: values are names in checkpoints, so they stay as they are.
RESIDUAL, SUM_RESIDUAL, VELOCITY = "owed", "owed again", "velocity"


class SegmentPlace(NamedTuple):
    """Where values lie: in a bucket with these slices, from `start` on."""

    parts: tuple[ParameterSlice, ...]
    start: int = 0
    #: as in `Bucket`
    is_exact: bool = False

    def after(self, count: int) -> SegmentPlace:
        """The place this many values later."""
        return self._replace(start=self.start + count)


def spans_of(place: SegmentPlace, count: int) -> tuple[Span, ...]:
    """The parameters that this many values belong to."""
    spans, begin, stop = [], 0, place.start + count
    for name, size in place.parts:
        first, last = max(place.start, begin), min(stop, begin + size)
        if first < last:
            spans.append(Span(name, first - begin, first - place.start, last - place.start))
        begin += size
    return tuple(spans)


class SegmentStates:
    """Makes segments, with views of what a sender keeps for its codec."""

    def __init__(self, compression: Compression) -> None:
        self._residuals = compression.residuals
        self._has_residual = compression.error_feedback
        self._has_velocity = compression.codec.has_velocity

    def at(self, place: SegmentPlace, count: int) -> CodecSegment:
        """A segment of this sender's own values."""
        return CodecSegment(
            spans_of(place, count),
            self._kept(RESIDUAL, place, count) if self._has_residual else None,
            self._kept(VELOCITY, place, count) if self._has_velocity else None,
        )

    def sum_segment(self, place: SegmentPlace, count: int) -> CodecSegment:
        """A segment of sums that this sender encodes again."""
        residual = self._kept(SUM_RESIDUAL, place, count) if self._has_residual else None
        return CodecSegment(spans_of(place, count), residual)

    def _kept(self, kind: str, place: SegmentPlace, count: int) -> Tensor:
        return self._residuals.of(kind, place.parts)[place.start : place.start + count]


def chunk_size(count: int, among: int, grain: int) -> int:
    """The size of the chunks into which senders split values; the last may be shorter.

    A multiple of `grain`, so some senders may have no chunk.
    """
    return -(-count // (among * grain)) * grain
