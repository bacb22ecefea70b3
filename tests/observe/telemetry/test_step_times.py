# SPDX-License-Identifier: Apache-2.0
"""The parts of a step's time: exclusive, of one thread, and complete."""

import threading

from hypothesis import given
from hypothesis import strategies as st

from fleetlight.observe.telemetry.catalogue import METRICS, STEP_PARTS, step_metric
from fleetlight.observe.telemetry.step_times import BACKWARD, DATA, FORWARD, PULL, StepTimes


class Clock:
    """Each reading is one second later."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


def test_a_part_inside_another_counts_once() -> None:
    times = StepTimes(Clock())
    times.begin()
    # the forward from 1 to 2 and from 3 to 4, the pull from 2 to 3; the reading is at 5
    with times.part(FORWARD), times.part(PULL):
        pass
    found = times.metrics()
    assert (found[step_metric("forward")], found[step_metric("pull")]) == (2.0, 1.0)
    assert found[step_metric("other")] == 1.0


def test_the_time_before_the_first_part_does_not_count() -> None:
    clock = Clock()
    times = StepTimes(clock)
    times.begin()
    clock.now = 1000.0
    with times.part(DATA):
        pass
    assert sum(times.metrics().values()) == 2.0


def test_nothing_counts_before_the_beginning_or_in_another_thread() -> None:
    times = StepTimes(Clock())
    assert times.enter(DATA) == -1
    assert times.metrics() == {}
    times.begin()
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(times.enter(BACKWARD)))
    thread.start()
    thread.join()
    assert found == [-1]
    assert sum(times.metrics().values()) == 0.0


@given(st.lists(st.integers(0, len(STEP_PARTS) - 2)))
def test_the_parts_add_up_to_the_whole_time(parts: list[int]) -> None:
    clock = Clock()
    times = StepTimes(clock)
    times.begin()
    begun = [times.enter(part) for part in parts]
    for before in reversed(begun):
        times.leave(before)
    # from the first reading to the one of `metrics`
    assert sum(times.metrics().values()) == (clock.now if parts else 0.0)


def test_an_error_leaves_the_part() -> None:
    times = StepTimes(Clock())
    times.begin()
    try:
        with times.part(PULL):
            raise ValueError
    except ValueError:
        pass
    before = times.metrics()[step_metric("pull")]
    with times.part(DATA):
        pass
    assert times.metrics()[step_metric("pull")] == before


def test_all_parts_are_in_the_catalogue() -> None:
    assert {step_metric(part) for part in STEP_PARTS} <= METRICS.keys()
