# SPDX-License-Identifier: Apache-2.0
"""HighWaterMarks: repeated pushes are applied once; other incarnations and epochs are refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetlight.errors import ProtocolError
from fleetlight.ps.high_water_marks import HighWaterMarks


def test_a_push_is_new_until_it_is_applied() -> None:
    marks = HighWaterMarks()
    assert marks.is_new(0, 1, epoch=0, sequence=0)
    assert marks.is_new(0, 1, epoch=0, sequence=0)
    marks.applied(0, 1, 0)
    assert not marks.is_new(0, 1, 0, 0)
    assert marks.is_new(0, 1, 0, 1)
    assert marks.is_new(1, 1, 0, 0)


def test_restarted_worker_counts_from_zero() -> None:
    marks = HighWaterMarks()
    marks.applied(0, 1, 7)
    assert marks.is_new(0, 2, 0, 0)
    marks.applied(0, 2, 0)
    with pytest.raises(ProtocolError, match=r"started at 2 has .*started at 1 still pushes"):
        marks.is_new(0, 1, 0, 8)


def test_server_older_than_the_acknowledgement_is_refused() -> None:
    marks = HighWaterMarks()
    # no push is acknowledged yet, or servers may lose pushes
    marks.check_has(0, 1, acknowledged=0)
    marks.applied(0, 1, 7)
    for acknowledged in (0, 6, 7):
        marks.check_has(0, 1, acknowledged)
    with pytest.raises(ProtocolError, match=r"push 8 of worker 0, but push 7 is the last one"):
        marks.check_has(0, 1, 8)
    # the mark belongs to the former incarnation
    with pytest.raises(ProtocolError, match=r"push 1 of worker 0, but push 0 is the last one"):
        marks.check_has(0, 2, 1)


def test_saved_marks_restore_the_state() -> None:
    marks = HighWaterMarks()
    marks.applied(1, 5, 7)
    marks.applied(0, 5, 3)
    assert marks.marks() == [(0, 5, 3), (1, 5, 7)]
    restored = HighWaterMarks(epoch=0, marks=marks.marks())
    assert not restored.is_new(1, 5, 0, 7)
    assert restored.is_new(1, 5, 0, 8)


def test_other_epochs_are_refused() -> None:
    marks = HighWaterMarks()
    marks.begin(1)
    for epoch in (0, 2):
        with pytest.raises(ProtocolError, match=f"epoch {epoch}, but this server is in epoch 1"):
            marks.is_new(0, 1, epoch, 0)
    assert marks.is_new(0, 1, 1, 0)
    with pytest.raises(ProtocolError, match="epochs only grow"):
        marks.begin(1)


@given(st.lists(st.integers(0, 3), max_size=40))
def test_repeated_pushes_are_applied_once(repeats: list[int]) -> None:
    """A worker sends 0, 1, 2 ..., and repeats each before the next."""
    marks = HighWaterMarks()
    applied = []
    for sequence, times in enumerate(repeats):
        for _ in range(times + 1):
            if marks.is_new(0, 0, 0, sequence):
                applied.append(sequence)
                marks.applied(0, 0, sequence)
    assert applied == list(range(len(repeats)))
