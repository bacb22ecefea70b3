# SPDX-License-Identifier: Apache-2.0
"""The poll schedule: at which places workers poll each other for a stop."""

import itertools
from collections.abc import Callable

import pytest

from fleetlight.fleet.checkpoints.stop_agreement import MAX_PLACES, POLL_EVERY_S, PollSchedule


def polled_places(places: int, seconds_of: Callable[[int], float]) -> tuple[list[int], list[float]]:
    """The places at which workers poll, and the seconds between polls."""
    schedule, polled, lengths, passed_s = PollSchedule(), [], [], 0.0
    for place in range(1, places + 1):
        passed_s += seconds_of(place)
        if schedule.advance():
            schedule.record_poll(passed_s)
            polled.append(place)
            lengths.append(passed_s)
            passed_s = 0.0
    return polled, lengths


def test_slow_steps_all_poll() -> None:
    assert polled_places(5, lambda _: 3.0)[0] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("step_s", [0.2, 0.02, 0.005])
def test_polls_come_about_twice_a_second(step_s: float) -> None:
    polled, lengths = polled_places(1000, lambda _: step_s)
    assert polled[:2] == [1, 3 if step_s < 0.2 else polled[1]]
    settled = lengths[8:]
    assert settled
    assert all(POLL_EVERY_S - step_s <= length <= POLL_EVERY_S + step_s for length in settled)


def test_polls_are_at_most_max_places_apart() -> None:
    polled, _ = polled_places(2000, lambda _: 1e-5)
    assert max(after - before for before, after in itertools.pairwise(polled)) == MAX_PLACES


def test_polls_follow_steps_that_become_slow() -> None:
    polled, _ = polled_places(400, lambda place: 0.005 if place < 200 else 2.0)
    slow = [place for place in polled if place >= 200]
    assert slow[0] <= 200 + MAX_PLACES
    assert slow[1:] == list(range(slow[1], 401))


def test_workers_with_equal_times_poll_at_the_same_places() -> None:
    schedules = [PollSchedule() for _ in range(3)]
    for place in range(300):
        arrived = {schedule.advance() for schedule in schedules}
        assert len(arrived) == 1
        if arrived == {True}:
            for schedule in schedules:
                schedule.record_poll(0.001 * (1 + place % 7))
