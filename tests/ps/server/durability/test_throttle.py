# SPDX-License-Identifier: Apache-2.0
"""Throttle: who works a tenth of the time rests nine times as long as it has worked."""

from __future__ import annotations

import time

import pytest

from fleetlight.ps.server.durability import durability as pace
from fleetlight.ps.server.durability.durability import Throttle


class Clock:
    """CPU seconds of the thread, and what it was told to wait."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.worked_s, self.waits, self.share = 0.0, list[float](), 0.1
        monkeypatch.setattr(time, "thread_time", lambda: self.worked_s)
        self.pace = Throttle(lambda: self.share, self.waits.append)

    def work(self, seconds: float) -> None:
        self.worked_s += seconds
        self.pace()


def test_it_rests_for_what_was_worked(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    clock.work(0.01)
    clock.work(0.02)
    assert clock.waits == pytest.approx([0.09, 0.18])
    clock.work(100.0)
    assert clock.waits[-1] == pace._MOST_S


def test_short_pieces_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    for _ in range(3):
        clock.work(0.0004)
    assert clock.waits == pytest.approx([9 * 0.0012])


@pytest.mark.parametrize("share", [1.0, 1.5])
def test_who_takes_all_does_not_rest(monkeypatch: pytest.MonkeyPatch, share: float) -> None:
    clock = Clock(monkeypatch)
    clock.share = share
    clock.work(0.5)
    clock.share = 0.1
    clock.work(0.01)
    # what was worked in a hurry is not made good
    assert clock.waits == pytest.approx([0.09])


def test_it_rests_less_once_it_may_take_more(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    for clock.share in (0.1, 0.5, 0.8):
        clock.work(0.04)
    assert clock.waits == pytest.approx([0.36, 0.04, 0.01])
