# SPDX-License-Identifier: Apache-2.0
"""HighWater: what comes twice is applied once, what is from another process or epoch not at all."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetlight.errors import ProtocolError
from fleetlight.ps.high_water_marks import HighWaterMarks


def test_a_push_is_new_until_it_is_applied() -> None:
    water = HighWaterMarks()
    assert water.is_new(0, 1, epoch=0, sequence=0)
    assert water.is_new(0, 1, epoch=0, sequence=0)
    water.applied(0, 1, 0)
    assert not water.is_new(0, 1, 0, 0)
    assert water.is_new(0, 1, 0, 1)
    assert water.is_new(1, 1, 0, 0)


def test_a_worker_that_was_started_again_counts_anew() -> None:
    water = HighWaterMarks()
    water.applied(0, 1, 7)
    assert water.is_new(0, 2, 0, 0)
    water.applied(0, 2, 0)
    with pytest.raises(ProtocolError, match=r"started at 2 has .*started at 1 still pushes"):
        water.is_new(0, 1, 0, 8)


def test_older_values_than_were_acknowledged_are_refused() -> None:
    water = HighWaterMarks()
    # nothing was acknowledged yet, or servers may lose some
    water.check_has(0, 1, acknowledged=0)
    water.applied(0, 1, 7)
    for acknowledged in (0, 6, 7):
        water.check_has(0, 1, acknowledged)
    with pytest.raises(ProtocolError, match=r"push 8 of worker 0, but push 7 is the last one"):
        water.check_has(0, 1, 8)
    # of another process that had its place
    with pytest.raises(ProtocolError, match=r"push 1 of worker 0, but push 0 is the last one"):
        water.check_has(0, 2, 1)


def test_marks_are_all_there_is_to_keep() -> None:
    water = HighWaterMarks()
    water.applied(1, 5, 7)
    water.applied(0, 5, 3)
    assert water.marks() == [(0, 5, 3), (1, 5, 7)]
    again = HighWaterMarks(epoch=0, marks=water.marks())
    assert not again.is_new(1, 5, 0, 7)
    assert again.is_new(1, 5, 0, 8)


def test_other_epochs_are_refused() -> None:
    water = HighWaterMarks()
    water.begin(1)
    for epoch in (0, 2):
        with pytest.raises(ProtocolError, match=f"epoch {epoch}, but this server is in epoch 1"):
            water.is_new(0, 1, epoch, 0)
    assert water.is_new(0, 1, 1, 0)
    with pytest.raises(ProtocolError, match="epochs only grow"):
        water.begin(1)


@given(st.lists(st.integers(0, 3), max_size=40))
def test_whatever_is_sent_again_is_applied_once(again: list[int]) -> None:
    """A worker sends 0, 1, 2 ..., each as often as it likes before the next."""
    water = HighWaterMarks()
    applied = []
    for sequence, times in enumerate(again):
        for _ in range(times + 1):
            if water.is_new(0, 0, 0, sequence):
                applied.append(sequence)
                water.applied(0, 0, sequence)
    assert applied == list(range(len(again)))
