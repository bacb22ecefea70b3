# SPDX-License-Identifier: Apache-2.0
"""Throttle: a task with a share of a tenth sleeps nine times as long as it worked."""

from __future__ import annotations

import time

import pytest

from fleetlight.ps.server.durability import durability
from fleetlight.ps.server.durability.durability import Throttle


class Clock:
    """CPU seconds of the thread, and the waits that the throttle asked for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.worked_s, self.waits, self.share = 0.0, list[float](), 0.1
        monkeypatch.setattr(time, "thread_time", lambda: self.worked_s)
        self.throttle = Throttle(lambda: self.share, self.waits.append)

    def work(self, seconds: float) -> None:
        self.worked_s += seconds
        self.throttle()


def test_it_sleeps_in_proportion_to_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    clock.work(0.01)
    clock.work(0.02)
    assert clock.waits == pytest.approx([0.09, 0.18])
    clock.work(100.0)
    assert clock.waits[-1] == durability._MAX_REST_S


def test_short_pieces_of_work_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    for _ in range(3):
        clock.work(0.0004)
    assert clock.waits == pytest.approx([9 * 0.0012])


@pytest.mark.parametrize("share", [1.0, 1.5])
def test_a_full_share_does_not_sleep(monkeypatch: pytest.MonkeyPatch, share: float) -> None:
    clock = Clock(monkeypatch)
    clock.share = share
    clock.work(0.5)
    clock.share = 0.1
    clock.work(0.01)
    # work at a full share is not slept for later
    assert clock.waits == pytest.approx([0.09])


def test_a_larger_share_sleeps_less(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    for clock.share in (0.1, 0.5, 0.8):
        clock.work(0.04)
    assert clock.waits == pytest.approx([0.36, 0.04, 0.01])
