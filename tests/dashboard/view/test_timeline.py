# SPDX-License-Identifier: Apache-2.0
"""One axis of time for all processes, with a maximum of moments."""

import math

import pytest

from fleetlight.dashboard.view.timeline import Timeline


def test_an_interval_counts_in_each_bin_that_it_covers() -> None:
    timeline = Timeline()
    timeline.start = 100.0
    timeline.spread("rate", 100.5, 102.5, total=20.0, count=2.0)
    timeline.spread("rate", 102.5, 103.0, total=20.0, count=0.5)
    assert timeline.times() == [100.5, 101.5, 102.5, 103.5]
    # in bin 102, 5 in half a second, then 20 in the other half
    assert timeline.line("rate") == pytest.approx([10.0, 10.0, 25.0, math.nan], nan_ok=True)


def test_newest_values_stay_as_they_are() -> None:
    timeline = Timeline()
    timeline.put("rows", 10.2, 3.0)
    timeline.put("rows", 10.9, 4.0)
    timeline.put("rows", 12.1, 5.0)
    assert timeline.line("rows") == pytest.approx([4.0, math.nan, 5.0], nan_ok=True)
    assert timeline.line("rows", first=2) == [5.0]


def test_two_bins_become_one_when_there_are_too_many() -> None:
    timeline = Timeline(most=4)
    for second in range(8):
        timeline.spread("step", second, second + 0.99, total=1.0, count=float(1 + second % 2))
        timeline.put("rows", second, float(second))
    assert (timeline.bins, timeline.width, timeline.generation) == (4, 2.0, 1)
    assert timeline.line("step") == pytest.approx([2 / 3] * 4)
    assert timeline.line("rows") == [1.0, 3.0, 5.0, 7.0]


def test_a_job_of_days_keeps_the_maximum() -> None:
    timeline = Timeline(most=100)
    for hour in range(24 * 14):
        timeline.put("rows", 3600.0 * hour, float(hour))
    assert timeline.bins <= 100
    assert timeline.line("rows")[-1] == 24 * 14 - 1


def test_moments_before_the_start_are_left_out() -> None:
    timeline = Timeline()
    timeline.start = 100.0
    timeline.put("rows", 99.0, 1.0)
    timeline.spread("rate", 98.0, 100.5, total=5.0, count=2.5)
    assert timeline.line("rows") == pytest.approx([math.nan], nan_ok=True)
    assert timeline.line("rate") == [2.0]


def test_unknown_lines_have_no_values() -> None:
    timeline = Timeline()
    timeline.put("rows", 1.0, 1.0)
    assert all(map(math.isnan, timeline.line("other")))
