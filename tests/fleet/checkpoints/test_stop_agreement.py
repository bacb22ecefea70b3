# SPDX-License-Identifier: Apache-2.0
"""When workers that pass the same places meet there, by plain numbers."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest

from fleetlight.fleet.checkpoints.stop_agreement import MAX_PLACES, POLL_EVERY_S, PollSchedule


def meetings(places: int, seconds_of: Callable[[int], float]) -> tuple[list[int], list[float]]:
    """At which of so many places workers meet, and how long it took each time."""
    schedule, met, lengths, passed_s = PollSchedule(), [], [], 0.0
    for place in range(1, places + 1):
        passed_s += seconds_of(place)
        if schedule.advance():
            schedule.record_poll(passed_s)
            met.append(place)
            lengths.append(passed_s)
            passed_s = 0.0
    return met, lengths


def test_slow_steps_are_all_met_at() -> None:
    assert meetings(5, lambda _: 3.0)[0] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("step_s", [0.2, 0.02, 0.005])
def test_meetings_are_about_twice_in_a_second(step_s: float) -> None:
    met, lengths = meetings(1000, lambda _: step_s)
    assert met[:2] == [1, 3 if step_s < 0.2 else met[1]]
    settled = lengths[8:]
    assert settled
    assert all(POLL_EVERY_S - step_s <= length <= POLL_EVERY_S + step_s for length in settled)


def test_fast_steps_are_never_many_between_two() -> None:
    met, _ = meetings(2000, lambda _: 1e-5)
    assert max(after - before for before, after in itertools.pairwise(met)) == MAX_PLACES


def test_steps_that_become_slow_are_met_at_soon_again() -> None:
    met, _ = meetings(400, lambda place: 0.005 if place < 200 else 2.0)
    slow = [place for place in met if place >= 200]
    assert slow[0] <= 200 + MAX_PLACES
    assert slow[1:] == list(range(slow[1], 401))


def test_all_who_hear_the_same_meet_at_the_same_places() -> None:
    schedules = [PollSchedule() for _ in range(3)]
    for place in range(300):
        arrived = {schedule.advance() for schedule in schedules}
        assert len(arrived) == 1
        if arrived == {True}:
            for schedule in schedules:
                schedule.record_poll(0.001 * (1 + place % 7))
