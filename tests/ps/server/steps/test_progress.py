# SPDX-License-Identifier: Apache-2.0
"""Clocks: which workers are behind. Versions: the staleness of each gradient."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from fleetlight.ps.server.steps.progress import Clocks, Versions


def test_all_workers_wait_for_the_slowest() -> None:
    clocks = Clocks(3)
    clocks.advance(0, phase=0, steps=5)
    clocks.advance(1, phase=0)
    assert clocks.slowest(0) == 0
    assert clocks.behind(0, at_least=1) == [2]
    clocks.advance(2, phase=0, steps=2)
    assert clocks.slowest(0) == 1
    assert clocks.all_have(0, at_least=1)
    assert clocks.behind(0, at_least=2) == [1]


def test_a_worker_that_ended_or_left_is_not_awaited() -> None:
    clocks = Clocks(3)
    clocks.advance(0, 0, 9)
    clocks.end(1, 0)
    assert clocks.behind(0, 9) == [2]
    clocks.leave(2)
    assert clocks.all_have(0, 9)
    assert clocks.slowest(0) == 9
    clocks.end(0, 0)
    assert clocks.all_have(0, 100)


def test_a_worker_that_resumes_an_ended_phase_is_awaited_again() -> None:
    clocks = Clocks(3)
    clocks.advance(0, 1, 9)
    clocks.end(1, 1)
    clocks.leave(2)
    assert clocks.all_have(1, 9)
    clocks.advance(1, 1)
    assert clocks.behind(1, 9) == [1]
    clocks.end(1, 1)
    assert clocks.all_have(1, 9)
    # a step in the next phase ends this one, and a worker that left does not return
    clocks.advance(1, 2)
    clocks.advance(2, 1)
    assert clocks.all_have(1, 9)


def test_each_phase_counts_from_zero() -> None:
    clocks = Clocks(2)
    clocks.advance(0, 0, 9)
    clocks.advance(1, 0, 4)
    clocks.end(0, 0)
    clocks.end(1, 0)
    clocks.advance(0, 1)
    # the steps before the barrier do not count for the worker that had fewer
    assert clocks.behind(1, 1) == [1]
    clocks.advance(1, 1)
    assert clocks.all_have(1, 1)
    # no worker waits in a phase that all have ended
    assert clocks.all_have(0, 100)


def test_staleness_counts_every_change_since() -> None:
    versions = Versions()
    versions.applied([0])
    versions.applied([0])  # the worker's own push counts
    versions.applied([1])
    versions.applied([3])
    assert versions.staleness == {0: 2, 1: 2}
    assert versions.version == 4


def test_a_synchronous_step_is_never_stale() -> None:
    versions = Versions()
    for step in range(5):
        versions.applied([step, step])
    assert versions.staleness == {0: 10}
    assert versions.version == 5


@given(st.lists(st.integers(0, 6), max_size=60))
def test_staleness_is_the_age_of_what_was_read(ages: list[int]) -> None:
    versions = Versions()
    expected: dict[int, int] = {}
    for step, age in enumerate(ages):
        late = min(age, step)
        expected[late] = expected.get(late, 0) + 1
        versions.applied([step - late])
    assert versions.staleness == expected


def test_a_worker_that_enters_is_awaited_from_its_phase_on() -> None:
    clocks = Clocks(2)
    clocks.advance(0, 1, 5)
    clocks.advance(1, 1, 5)
    clocks.enter(2, 2)
    assert clocks.all_have(1, 5)
    clocks.advance(0, 2, 3)
    clocks.advance(1, 2, 3)
    assert clocks.behind(2, 1) == [2]
    clocks.leave(2)
    clocks.enter(2, 3)
    assert clocks.all_have(2, 3)
    assert clocks.slowest(3) == 0
