# SPDX-License-Identifier: Apache-2.0
"""Schedules: k steps between averagings, none up to begin_step, equal after any restart."""

import json
import math

from hypothesis import given
from hypothesis import strategies as st

from fleetlight.collective.local_training.schedule import AdaptiveInterval, FixedInterval

ks = st.integers(1, 9)
begins = st.integers(0, 12)


def averaging_steps(schedule: FixedInterval, steps: int) -> list[int]:
    """The steps after which the workers average."""
    averaged = []
    for _ in range(steps):
        if schedule.step_made():
            schedule.averaged()
            averaged.append(schedule.step)
    return averaged


@given(ks, begins)
def test_averagings_are_k_steps_apart_after_begin_step(k: int, begin: int) -> None:
    assert averaging_steps(FixedInterval(k, begin), 60) == list(range(begin + k, 61, k))


@given(ks, begins, st.integers(0, 40))
def test_workers_train_alone_after_begin_step(k: int, begin: int, steps: int) -> None:
    schedule = FixedInterval(k, begin)
    for done in range(steps):
        assert schedule.next_is_local == (done + 1 > begin)
        will_average = schedule.averages_next
        assert schedule.step_made() == will_average
        assert schedule.differs == (schedule.step - schedule.last > 0)
        # up to begin_step the workers are always equal
        assert not (schedule.differs and schedule.step <= begin)
        if will_average:
            schedule.averaged()


def test_an_early_averaging_starts_a_new_window() -> None:
    schedule = FixedInterval(4, 0)
    assert averaging_steps(schedule, 2) == []
    schedule.averaged()
    assert averaging_steps(schedule, 9) == [6, 10]


@given(ks, begins, st.integers(0, 30), st.integers(0, 30))
def test_a_restart_at_any_step_changes_nothing(k: int, begin: int, before: int, after: int) -> None:
    whole, first, second = FixedInterval(k, begin), FixedInterval(k, begin), FixedInterval(k, begin)
    averaging_steps(whole, before)
    averaging_steps(first, before)
    second.load(json.loads(json.dumps(first.state())))
    assert averaging_steps(second, after) == averaging_steps(whole, after)


def test_restart_at_starts_with_equal_workers() -> None:
    schedule = FixedInterval(3, 10)
    schedule.restart_at(20)
    assert not schedule.differs
    assert averaging_steps(schedule, 7) == [23, 26]


losses = st.floats(1e-3, 1e3)
rates = st.floats(1e-4, 1.0)


@given(st.integers(1, 8), st.integers(1, 20), losses, losses, rates, rates)
def test_k_follows_the_formula(
    init_k: int, max_k: int, loss_0: float, loss: float, lr_0: float, lr: float
) -> None:
    schedule = AdaptiveInterval(init_k, max_k, 0)
    schedule.first(loss_0, lr_0)
    schedule.adapt(loss, lr)
    wanted = math.ceil(init_k * math.sqrt(lr_0 * loss / (lr * loss_0)))
    assert schedule.k == min(max_k, max(1, wanted))


def test_k_starts_at_init_k_within_the_limit() -> None:
    assert AdaptiveInterval(3, 16, 0).k == 3
    assert AdaptiveInterval(30, 16, 0).k == 16


def test_non_finite_losses_are_handled() -> None:
    schedule = AdaptiveInterval(4, 16, 0)
    schedule.first(math.nan, 0.1)
    schedule.first(math.inf, 0.1)
    assert schedule.wants_first
    schedule.adapt(1.0, 0.1)
    assert schedule.k == 4
    schedule.first(2.0, 0.1)
    assert not schedule.wants_first
    for loss, lr, k in [
        (math.nan, 0.1, 4),
        (math.inf, 0.1, 16),
        (-1.0, 0.1, 1),
        (0.0, 0.1, 1),
        (2.0, 0.0, 16),
    ]:
        schedule.adapt(loss, lr)
        assert schedule.k == k
        schedule.k = 4


def test_a_smaller_k_ends_a_longer_window() -> None:
    schedule = AdaptiveInterval(8, 16, 0)
    averaging_steps(schedule, 5)
    schedule.k = 3
    assert schedule.averages_next
    assert schedule.step_made()


def adaptive(schedule: AdaptiveInterval, step_losses: list[float]) -> list[int]:
    """Makes steps with these losses; returns k after each."""
    ks = []
    for loss in step_losses:
        meets = schedule.step_made()
        if schedule.wants_first:
            schedule.first(loss, 0.1)
        if meets:
            schedule.adapt(loss, 0.1)
            schedule.averaged()
        ks.append(schedule.k)
    return ks


@given(st.lists(losses, max_size=30), st.lists(losses, max_size=30), begins)
def test_k_continues_after_a_restart(before: list[float], after: list[float], begin: int) -> None:
    whole, first, second = (
        AdaptiveInterval(4, 16, begin),
        AdaptiveInterval(4, 16, begin),
        AdaptiveInterval(4, 16, begin),
    )
    adaptive(whole, before)
    adaptive(first, before)
    second.load(json.loads(json.dumps(first.state())))
    assert adaptive(second, after) == adaptive(whole, after)


def test_a_schedule_loads_the_state_of_another_kind() -> None:
    schedule, other = FixedInterval(4, 0), AdaptiveInterval(2, 16, 0)
    averaging_steps(schedule, 6)
    other.load(schedule.state())
    assert (other.step, other.last, other.k, other.wants_first) == (6, 4, 2, True)
    schedule.load(other.state())
    assert (schedule.step, schedule.last, schedule.k) == (6, 4, 4)
