# SPDX-License-Identifier: Apache-2.0
"""Throughput through kills: the depth and the end of a dip, and a small job that has both kills."""

from __future__ import annotations

import re

import pytest
from benchmarks.kills import Line, binned, dip

from benchmarks import kills

#: 6 s at 100, 2 s of nothing from 6.2 s on, 1 s at half the rate, and 7 s at 100
RATES = [100.0] * 12 + [40.0] + [0.0] * 3 + [50.0] * 2 + [100.0] * 14


def test_steps_are_counted_by_bins() -> None:
    # what was before the clock started does not count
    assert binned([-1.0, 0.1, 0.2, 0.6, 1.4, 1.5], 2.0, 512) == [2048.0, 1024.0, 1024.0, 1024.0]


def test_a_dip_has_a_depth_an_end_and_an_area() -> None:
    found = dip(RATES, 6.2, 16.0)
    assert (found.before, found.lowest) == (100.0, 0.0)
    # two whole bins at 100 end at 10 s
    assert found.back_s == pytest.approx(10.0 - 6.2)
    assert found.lost_s == pytest.approx((60 + 300 + 100) * 0.5 / 100)


def test_a_rate_that_stays_has_no_dip() -> None:
    found = dip([100.0, 95.0] * 16, 6.2, 16.0)
    assert (found.back_s, found.lost_s) == (0.0, pytest.approx(0.0))


def test_a_rate_that_never_returns_says_so() -> None:
    assert dip([100.0] * 12 + [0.0] * 20, 6.2, 16.0).back_s == float("inf")


def test_a_late_dip_is_noise() -> None:
    assert dip([*RATES[:-2], 10.0, 10.0], 6.2, 16.0).back_s == pytest.approx(10.0 - 6.2)


def test_the_page_has_costs_and_the_round_in_the_middle() -> None:
    calm = Line([[60.0] * 32, [60.0] * 32], {}, 0.1)
    half = [rate / 2 for rate in RATES]
    slow = [rate / 2 for rate in [*RATES[:12], *[0.0] * 8, *[100.0] * 12]]
    found = [Line([one] * 2, {"server 1": 6.2, "worker 1": 11.2}, 0.0) for one in (half, slow)]
    costs = kills.costs(found, [calm, calm], 4.8)
    assert "| SIGKILL of server 1 | 0.00 (0.00..0.00) | 4.30 (3.80..4.80) | met |" in costs
    assert "| SIGKILL of worker 1 | " in costs
    assert "| durability='none', no kill | 120 (120..120) |" in costs
    assert "median 5%, highest 10%" in costs
    course = kills.course(found[:1], [calm], 4.8)
    assert "| server 1 | 6.20 |" in course
    assert "| 6 | 40 | 20 | 20 | 120 |" in course


@pytest.mark.long
@pytest.mark.multiprocess
@pytest.mark.timeout(300)
def test_a_job_goes_on_after_both_kills(capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--rounds", "1", "--calm_s", "2", "--between_s", "15", "--no-write"]
    assert kills.main(small) == 0
    output = capsys.readouterr().out
    assert "| SIGKILL of server 1 | 0.00 " in output
    # a machine with other programs may be slower than the pace, but both workers train again
    bins = re.findall(r"^\| [\d.]+ \| \S+ \| (\S+) \| (\S+) \| \S+ \|$", output, re.MULTILINE)
    assert len(bins) == 64
    for worker in range(2):
        assert any(one[worker] != "0" for one in bins[-10:]), output
