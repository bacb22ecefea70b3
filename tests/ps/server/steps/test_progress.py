# SPDX-License-Identifier: Apache-2.0
"""Who is behind, and how old the values were that a gradient was made with."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from fleetlight.ps.server.steps.progress import Clocks, Versions


def test_the_slowest_holds_the_others_up() -> None:
    clocks = Clocks(3)
    clocks.advance(0, phase=0, steps=5)
    clocks.advance(1, phase=0)
    assert clocks.slowest(0) == 0
    assert clocks.behind(0, at_least=1) == [2]
    clocks.advance(2, phase=0, steps=2)
    assert clocks.slowest(0) == 1
    assert clocks.all_have(0, at_least=1)
    assert clocks.behind(0, at_least=2) == [1]


def test_who_has_ended_or_left_holds_nobody_up() -> None:
    clocks = Clocks(3)
    clocks.advance(0, 0, 9)
    clocks.end(1, 0)
    assert clocks.behind(0, 9) == [2]
    clocks.leave(2)
    assert clocks.all_have(0, 9)
    assert clocks.slowest(0) == 9
    clocks.end(0, 0)
    assert clocks.all_have(0, 100)


def test_who_goes_on_in_a_phase_it_had_ended_holds_others_up_again() -> None:
    clocks = Clocks(3)
    clocks.advance(0, 1, 9)
    clocks.end(1, 1)
    clocks.leave(2)
    assert clocks.all_have(1, 9)
    clocks.advance(1, 1)
    assert clocks.behind(1, 9) == [1]
    clocks.end(1, 1)
    assert clocks.all_have(1, 9)
    # what comes in the next phase has ended this one, and who has left does not come back
    clocks.advance(1, 2)
    clocks.advance(2, 1)
    assert clocks.all_have(1, 9)


def test_each_phase_counts_anew() -> None:
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
    # a phase that all have ended holds nobody up
    assert clocks.all_have(0, 100)


def test_staleness_counts_every_change_since() -> None:
    versions = Versions()
    versions.applied([0])
    versions.applied([0])  # its worker's own push is one
    versions.applied([1])
    versions.applied([3])
    assert versions.staleness == {0: 2, 1: 2}
    assert versions.version == 4


def test_a_step_of_all_is_never_stale() -> None:
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
