# SPDX-License-Identifier: Apache-2.0
"""What tells processes apart that start at once."""

from __future__ import annotations

import time

import pytest

from fleetlight.ps.worker.replay.step_journal import start_stamp


def test_processes_that_start_in_the_same_microsecond_differ(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = time.time_ns()
    monkeypatch.setattr(time, "time_ns", lambda: now)
    assert len({start_stamp() for _ in range(20)}) == 20


def test_a_later_start_has_a_greater_stamp_which_fits_into_int64(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    year_2200 = 7_258_118_400 * 10**9
    monkeypatch.setattr(time, "time_ns", lambda: year_2200)
    first = max(start_stamp() for _ in range(20))
    monkeypatch.setattr(time, "time_ns", lambda: year_2200 + 10**6)
    assert first < start_stamp() < 2**63
