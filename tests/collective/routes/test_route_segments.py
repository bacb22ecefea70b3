# SPDX-License-Identifier: Apache-2.0
"""Which parameters the values of a piece belong to, and their residuals."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.collective.rounding import rounded

from fleetlight.collective.buckets import ParameterSlice
from fleetlight.collective.codecs.error_feedback import ErrorFeedback
from fleetlight.collective.routes.route_segments import (
    SegmentPlace,
    SegmentStates,
    chunk_size,
    spans_of,
)

PARTS = (ParameterSlice("a", 5), ParameterSlice("b", 1), ParameterSlice("c", 4))


def test_a_piece_may_cut_parameters() -> None:
    assert spans_of(SegmentPlace(PARTS, 3), 5) == (("a", 3, 0, 2), ("b", 0, 2, 3), ("c", 0, 3, 5))
    assert spans_of(SegmentPlace(PARTS, 7), 2) == (("c", 1, 0, 2),)
    assert spans_of(SegmentPlace(PARTS, 10), 0) == ()


@given(sizes=st.lists(st.integers(1, 20), min_size=1), size=st.integers(1, 30))
def test_each_value_of_each_piece_belongs_to_one_parameter(sizes: list[int], size: int) -> None:
    parts = tuple(ParameterSlice(str(i), n) for i, n in enumerate(sizes))
    expected = [(name, k) for name, n in parts for k in range(n)]
    found, place = [], SegmentPlace(parts)
    for values in torch.arange(sum(sizes)).split(size):
        spans = spans_of(place, len(values))
        assert [s.start for s in spans] == [0, *(s.stop for s in spans[:-1])]
        found += [(s.name, s.at + k) for s in spans for k in range(s.stop - s.start)]
        place = place.after(len(values))
    assert found == expected


@given(count=st.integers(0, 5000), among=st.integers(2, 9), grain=st.sampled_from([1, 7, 256]))
def test_chunks_cover_all_values(count: int, among: int, grain: int) -> None:
    size = chunk_size(count, among, grain)
    assert size % grain == 0
    assert count <= among * size < count + among * grain


def segments(error_feedback: bool = True) -> tuple[SegmentStates, ErrorFeedback]:
    compression = rounded(error_feedback=error_feedback)
    return SegmentStates(compression), compression.residuals


def test_residuals_of_a_segment_are_views() -> None:
    states, kept = segments()
    residual = states.at(SegmentPlace(PARTS, 3), 5).residual
    again = states.sum_segment(SegmentPlace(PARTS, 3), 5).residual
    assert residual is not None
    assert again is not None
    residual.fill_(1.0)
    again.fill_(2.0)
    assert kept.of("owed", PARTS).tolist() == [0, 0, 0, 1, 1, 1, 1, 1, 0, 0]
    assert kept.of("owed again", PARTS).tolist() == [0, 0, 0, 2, 2, 2, 2, 2, 0, 0]


def test_without_error_feedback_there_is_no_residual() -> None:
    states, kept = segments(error_feedback=False)
    assert states.at(SegmentPlace(PARTS), 10).residual is None
    assert states.sum_segment(SegmentPlace(PARTS), 10).residual is None
    assert states.at(SegmentPlace(PARTS), 10).velocity is None
    assert not kept.state()


def test_a_codec_with_momentum_gets_its_velocity() -> None:
    compression = rounded()
    compression.codec.has_velocity = True
    states = SegmentStates(compression)
    velocity = states.at(SegmentPlace(PARTS, 1), 2).velocity
    assert velocity is not None
    velocity.fill_(1.0)
    assert compression.residuals.of("velocity", PARTS).tolist() == [0, 1, 1, 0, 0, 0, 0, 0, 0, 0]
