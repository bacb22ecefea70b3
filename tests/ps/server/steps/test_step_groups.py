# SPDX-License-Identifier: Apache-2.0
"""StepGroups: which pushes form one step, also when workers have uneven data."""

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


def test_an_incomplete_step_can_be_inspected() -> None:
    groups: StepGroups[str] = StepGroups(3)
    assert groups.begun(0, worker=1) is None
    groups.add(0, worker=1, phase=0, step=0, contribution="b")
    groups.add(0, worker=0, phase=0, step=0, contribution="a")
    begun = groups.begun(0, worker=1)
    assert begun is not None
    assert list(begun.contributions.items()) == [(0, "a"), (1, "b")]
    assert groups.begun(0, worker=2) is groups.begun(1, worker=1) is None
    # after a step is undone, only pushes of the new attempt
    groups.undone(begun.optimizer, begun.contributions)
    groups.add(0, worker=1, phase=0, step=0, contribution="again")
    latest = groups.begun(0, worker=1)
    assert latest is not None
    assert latest.contributions == {1: "again"}


def test_each_optimizer_has_its_own_steps() -> None:
    groups: StepGroups[str] = StepGroups(2)
    assert groups.add(0, 0, 0, 0, "a") is None
    assert groups.add(1, 1, 0, 0, "b") is None
    complete = groups.add(0, 1, 0, 0, "c")
    assert complete is not None
    assert (complete.optimizer, complete.contributions) == (0, {0: "a", 1: "c"})


def test_a_worker_that_ended_the_phase_is_not_awaited() -> None:
    groups: StepGroups[str] = StepGroups(2)
    assert groups.add(0, 0, 0, 0, "a") is None
    (complete,) = groups.end(worker=1, phase=0)
    assert complete.contributions == {0: "a"}
    alone = groups.add(0, 0, 0, 1, "b")
    assert alone is not None
    # the next phase waits for it again
    assert groups.end(0, 0) == []
    assert groups.add(0, 0, 1, 2, "c") is None


def test_a_worker_that_left_is_not_awaited() -> None:
    groups: StepGroups[str] = StepGroups(2)
    assert groups.add(0, 0, 0, 0, "a") is None
    (complete,) = groups.leave(1)
    assert complete.contributions == {0: "a"}


def test_after_uneven_phases_the_step_is_the_largest_one() -> None:
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
def test_repeated_or_omitted_steps_are_refused(step: int) -> None:
    groups: StepGroups[str] = StepGroups(1)
    groups.add(0, 0, 0, 0, "a")
    with pytest.raises(
        ProtocolError, match=rf"pushed step {step} .* after step 0, expected step 1"
    ):
        groups.add(0, 0, 0, step, "b")
    assert groups.add(0, 0, 0, 1, "c") is not None


def test_a_step_that_was_undone_may_be_pushed_again() -> None:
    groups: StepGroups[str] = StepGroups(1)
    complete = groups.add(0, 0, 0, 0, "a")
    assert complete is not None
    groups.undone(complete.optimizer, complete.contributions)
    assert groups.add(0, 0, 0, 0, "a") is not None
    # but only once each time
    with pytest.raises(ProtocolError):
        groups.add(0, 0, 0, 0, "a")


def test_a_step_that_was_done_may_not_be_pushed_again() -> None:
    groups: StepGroups[str] = StepGroups(1)
    complete = groups.add(0, 0, 0, 0, "a")
    assert complete is not None
    groups.undone(complete.optimizer, complete.contributions)
    groups.done(complete.optimizer, complete.contributions)
    with pytest.raises(ProtocolError):
        groups.add(0, 0, 0, 0, "a")


def test_awaited_workers_are_listed_by_optimizer() -> None:
    groups: StepGroups[str] = StepGroups(3)
    groups.add(0, 1, 0, 0, "a")
    groups.add(2, 1, 0, 0, "b")
    groups.add(2, 0, 0, 0, "c")
    assert groups.awaited_by(1) == {0: [0, 2], 2: [2]}
    assert groups.awaited_by(2) == {}


def test_without_consecutive_steps_may_be_omitted() -> None:
    groups: StepGroups[str] = StepGroups(1, consecutive=False)
    assert groups.add(0, 0, 0, 3, "a") is not None
    assert groups.add(0, 0, 0, 7, "a") is not None


def test_pushes_in_an_ended_phase_are_refused() -> None:
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
def test_each_push_is_in_one_step_of_all_active_workers(amounts: list[int], order: object) -> None:
    """Workers with these numbers of steps push in any order, one push in flight each."""
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


def test_a_complete_step_is_in_progress_until_it_is_carried_out() -> None:
    """A snapshot of the positions must not count the step before it is applied."""
    groups: StepGroups[str] = StepGroups(2)
    for step in (0, 1):
        assert groups.add(0, 0, 0, step, "a") is None
        complete = groups.add(0, 1, 0, step, "b")
        assert complete is not None
        assert [pushes for _, _, _, pushes, _, _ in groups.state().positions] == [step, step]
        groups.carried_out(complete)
        assert [pushes for _, _, _, pushes, _, _ in groups.state().positions] == [step + 1] * 2


def test_a_place_keeps_no_position_of_its_former_worker() -> None:
    groups: StepGroups[str] = StepGroups(2)
    assert groups.add(0, 0, 0, 0, "a") is None
    assert groups.add(0, 1, 0, 0, "b") is not None
    groups.leave(1)
    groups.enter(1, 1)
    assert groups.add(0, 0, 0, 1, "a") is not None, "it is not awaited before its phase"
    groups.end(0, 0)
    assert groups.add(0, 0, 1, 2, "a") is None
    complete = groups.add(0, 1, 1, 7, "c")
    assert complete is not None
    assert complete.contributions == {0: "a", 1: "c"}
