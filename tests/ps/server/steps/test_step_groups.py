# SPDX-License-Identifier: Apache-2.0
"""StepGroups: whose pushes make one step, also when workers have different amounts of data."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetlight.errors import ProtocolError
from fleetlight.ps.server.steps.step_groups import StepGroups


def test_a_step_is_complete_when_all_have_pushed() -> None:
    groups: StepGroups[str] = StepGroups(3)
    assert groups.add(0, worker=2, phase=0, step=0, contribution="c") is None
    assert groups.add(0, worker=0, phase=0, step=0, contribution="a") is None
    assert groups.missing(0, worker=2) == [1]
    complete = groups.add(0, worker=1, phase=0, step=0, contribution="b")
    assert complete is not None
    # in the order of the workers, not of arrival
    assert list(complete.contributions.items()) == [(0, "a"), (1, "b"), (2, "c")]
    assert groups.missing(0, worker=2) == []


def test_what_has_come_of_a_step_can_be_looked_at() -> None:
    groups: StepGroups[str] = StepGroups(3)
    assert groups.begun(0, worker=1) is None
    groups.add(0, worker=1, phase=0, step=0, contribution="b")
    groups.add(0, worker=0, phase=0, step=0, contribution="a")
    begun = groups.begun(0, worker=1)
    assert begun is not None
    assert list(begun.contributions.items()) == [(0, "a"), (1, "b")]
    assert groups.begun(0, worker=2) is groups.begun(1, worker=1) is None
    # of a step tried again, what has come of the new try
    groups.undone(begun.optimizer, begun.contributions)
    groups.add(0, worker=1, phase=0, step=0, contribution="again")
    latest = groups.begun(0, worker=1)
    assert latest is not None
    assert latest.contributions == {1: "again"}


def test_optimizers_step_apart() -> None:
    groups: StepGroups[str] = StepGroups(2)
    assert groups.add(0, 0, 0, 0, "a") is None
    assert groups.add(1, 1, 0, 0, "b") is None
    complete = groups.add(0, 1, 0, 0, "c")
    assert complete is not None
    assert (complete.optimizer, complete.contributions) == (0, {0: "a", 1: "c"})


def test_who_ends_a_phase_is_not_waited_for() -> None:
    groups: StepGroups[str] = StepGroups(2)
    assert groups.add(0, 0, 0, 0, "a") is None
    (complete,) = groups.end(worker=1, phase=0)
    assert complete.contributions == {0: "a"}
    alone = groups.add(0, 0, 0, 1, "b")
    assert alone is not None
    # in the next phase it is again
    assert groups.end(0, 0) == []
    assert groups.add(0, 0, 1, 2, "c") is None


def test_who_leaves_is_not_waited_for() -> None:
    groups: StepGroups[str] = StepGroups(2)
    assert groups.add(0, 0, 0, 0, "a") is None
    (complete,) = groups.leave(1)
    assert complete.contributions == {0: "a"}


def test_after_uneven_phases_the_largest_step_counts() -> None:
    groups: StepGroups[str] = StepGroups(2)
    for step in (0, 1):
        groups.add(0, 0, 0, step, "a")
        groups.add(0, 1, 0, step, "b")
    groups.end(1, 0)
    assert groups.add(0, 0, 0, 2, "a") is not None
    groups.end(0, 0)
    assert groups.add(0, 0, 1, 3, "a") is None
    complete = groups.add(0, 1, 1, 2, "b")
    assert complete is not None
    assert complete.step == 3


@pytest.mark.parametrize("step", [0, 2])
def test_steps_are_neither_repeated_nor_left_out(step: int) -> None:
    groups: StepGroups[str] = StepGroups(1)
    groups.add(0, 0, 0, 0, "a")
    with pytest.raises(
        ProtocolError, match=rf"pushed step {step} .* after step 0, expected step 1"
    ):
        groups.add(0, 0, 0, step, "b")
    assert groups.add(0, 0, 0, 1, "c") is not None


def test_a_step_that_was_not_applied_may_come_again() -> None:
    groups: StepGroups[str] = StepGroups(1)
    complete = groups.add(0, 0, 0, 0, "a")
    assert complete is not None
    groups.undone(complete.optimizer, complete.contributions)
    assert groups.add(0, 0, 0, 0, "a") is not None
    # but only once for each time
    with pytest.raises(ProtocolError):
        groups.add(0, 0, 0, 0, "a")


def test_a_step_that_was_applied_after_all_may_not_come_again() -> None:
    groups: StepGroups[str] = StepGroups(1)
    complete = groups.add(0, 0, 0, 0, "a")
    assert complete is not None
    groups.undone(complete.optimizer, complete.contributions)
    groups.done(complete.optimizer, complete.contributions)
    with pytest.raises(ProtocolError):
        groups.add(0, 0, 0, 0, "a")


def test_whom_a_worker_waits_for_is_known_by_optimizer() -> None:
    groups: StepGroups[str] = StepGroups(3)
    groups.add(0, 1, 0, 0, "a")
    groups.add(2, 1, 0, 0, "b")
    groups.add(2, 0, 0, 0, "c")
    assert groups.awaited_by(1) == {0: [0, 2], 2: [2]}
    assert groups.awaited_by(2) == {}


def test_some_streams_may_leave_steps_out() -> None:
    groups: StepGroups[str] = StepGroups(1, consecutive=False)
    assert groups.add(0, 0, 0, 3, "a") is not None
    assert groups.add(0, 0, 0, 7, "a") is not None


def test_a_phase_that_was_ended_is_over() -> None:
    groups: StepGroups[str] = StepGroups(2)
    groups.end(0, 1)
    with pytest.raises(ProtocolError, match="phase 1, but it ended phase 1"):
        groups.add(0, 0, 1, 0, "a")
    groups.add(0, 0, 3, 0, "a")
    with pytest.raises(ProtocolError, match="phase 2 after one of 3"):
        groups.add(0, 0, 2, 1, "a")
    groups.leave(0)
    with pytest.raises(ProtocolError, match="after it had left"):
        groups.add(0, 0, 3, 1, "a")


@given(
    amounts=st.lists(st.integers(0, 5), min_size=1, max_size=4),
    order=st.randoms(use_true_random=False),
)
def test_every_push_is_in_one_step_of_all_that_go_on(amounts: list[int], order: object) -> None:
    """Any order of arrival of workers with so many steps each, one in flight."""
    workers = len(amounts)
    groups: StepGroups[tuple[int, int]] = StepGroups(workers)
    steps = []
    todo = [list(range(amount)) for amount in amounts]
    idle = set(range(workers))
    while idle:
        worker = order.choice(sorted(idle))  # type: ignore[attr-defined]
        idle.discard(worker)
        if todo[worker]:
            step = todo[worker].pop(0)
            found = groups.add(0, worker, 0, step, (worker, step))
            done = [] if found is None else [found]
        else:
            done = groups.end(worker, 0)
        for complete in done:
            steps.append(complete)
            idle.update(complete.contributions)
    assert len(steps) == max(amounts)
    for number, complete in enumerate(steps):
        members = [worker for worker in range(workers) if amounts[worker] > number]
        assert complete.contributions == {worker: (worker, number) for worker in members}


def test_a_step_that_is_complete_is_under_way_until_it_is_carried_out() -> None:
    """Whoever writes down how far everybody is must not find it made before it is."""
    groups: StepGroups[str] = StepGroups(2)
    for step in (0, 1):
        assert groups.add(0, 0, 0, step, "a") is None
        complete = groups.add(0, 1, 0, step, "b")
        assert complete is not None
        assert [pushes for _, _, _, pushes, _, _ in groups.state().positions] == [step, step]
        groups.carried_out(complete)
        assert [pushes for _, _, _, pushes, _, _ in groups.state().positions] == [step + 1] * 2
