# SPDX-License-Identifier: Apache-2.0
"""Pieces of buckets as codecs see them: whose values, and what this sender keeps of them."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from fleetlight.collective.buckets import ParameterSlice
from fleetlight.collective.codecs.codec import CodecSegment, Span
from fleetlight.collective.codecs.compression import Compression

#: what was left out of a gradient, and what was left out of the sum of a chunk
OWED, OWED_AGAIN, VELOCITY = "owed", "owed again", "velocity"


class SegmentPlace(NamedTuple):
    """Where values lie: in a bucket with these parts, from `start` on."""

    parts: tuple[ParameterSlice, ...]
    start: int = 0
    #: as in `Bucket`
    is_exact: bool = False

    def behind(self, count: int) -> SegmentPlace:
        """The place so many values later."""
        return self._replace(start=self.start + count)


def spans_of(place: SegmentPlace, count: int) -> tuple[Span, ...]:
    """Which parameters so many values belong to."""
    spans, begin, stop = [], 0, place.start + count
    for name, size in place.parts:
        first, last = max(place.start, begin), min(stop, begin + size)
        if first < last:
            spans.append(Span(name, first - begin, first - place.start, last - place.start))
        begin += size
    return tuple(spans)


class SegmentStates:
    """Makes stretches, with views of what a sender keeps for its codec."""

    def __init__(self, compression: Compression) -> None:
        self._ledger = compression.ledger
        self._owes = compression.error_feedback
        self._has_velocity = compression.codec.has_velocity

    def at(self, place: SegmentPlace, count: int) -> CodecSegment:
        """Values of this sender, before they are sent."""
        return CodecSegment(
            spans_of(place, count),
            self._kept(OWED, place, count) if self._owes else None,
            self._kept(VELOCITY, place, count) if self._has_velocity else None,
        )

    def of_sums(self, place: SegmentPlace, count: int) -> CodecSegment:
        """Sums that this sender sends on."""
        owed = self._kept(OWED_AGAIN, place, count) if self._owes else None
        return CodecSegment(spans_of(place, count), owed)

    def _kept(self, kind: str, place: SegmentPlace, count: int) -> Tensor:
        return self._ledger.of(kind, place.parts)[place.start : place.start + count]


def chunk_size(count: int, among: int, grain: int) -> int:
    """How long the chunks are into which values are split among senders; the last may be shorter.

    They are multiples of `grain`, so some senders may be left without.
    """
    return -(-count // (among * grain)) * grain
