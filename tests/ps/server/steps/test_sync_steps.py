# SPDX-License-Identifier: Apache-2.0
"""Steps that all workers make as one: sums, uneven ends, skips, clipping, rows pulled ahead."""

from __future__ import annotations

import concurrent.futures
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tests.ps.serving import Worker, opened, plan, team, together

from fleetlight.errors import DeadlineError, GradientError, PlanError, ProtocolError
from fleetlight.ps import messages as m
from fleetlight.ps.plan import OptimizerPlan
from fleetlight.wire.control_signals import NO_SIGNAL, ControlSignal


def both(workers: list[Worker], call: Callable[[Worker], Any]) -> list[Any]:
    """What each worker is answered when all make the same call."""
    answers = together(*[lambda w=w: call(w) for w in workers])  # type: ignore[misc]
    for answer in answers:
        if isinstance(answer, Exception):
            raise answer
    return answers


def test_a_step_is_the_mean_over_all_workers() -> None:
    first, second = team(opened(plan()))
    one, two = together(
        lambda: first.push(0, {0: ([1, 2, 1], [1, 2, 3])}, [1, 0, 0]),
        lambda: second.push(0, {0: ([2], [4])}, [1, 1, 0]),
    )
    # divided by the workers, not by those that touched the row
    assert first.pull(0, [1, 2]) == [-2, -3]
    assert first.dense() == [0, 0.5, 1]
    assert one[0] == two[0]
    assert one[0].version == 1
    np.testing.assert_array_equal(one[1], two[1])


def test_workers_whose_data_ends_leave_the_step() -> None:
    server = opened(plan(workers=3))
    workers = team(server, 3)
    both(workers, lambda w: w.push(0, {0: ([1], [3])}))
    answers = together(
        lambda: workers[0].push(1, {0: ([1], [4])}),
        lambda: workers[1].push(1, {0: ([1], [2])}),
        lambda: workers[2].say(m.EndPhase(0)),
    )
    assert answers[0][0].version == 2
    assert workers[0].pull(0, [1]) == [-6]
    together(lambda: workers[0].push(2, {0: ([1], [1])}), lambda: workers[1].say(m.Leave()))
    assert workers[0].pull(0, [1]) == [-7]


def test_hyper_parameters_are_those_of_whoever_is_furthest() -> None:
    workers = team(opened(plan()))
    together(
        lambda: workers[0].push(3, {0: ([1], [1])}, options=[{"lr": 100.0}]),
        lambda: workers[1].push(7, {0: ([1], [1])}, options=[{"lr": 0.5}]),
    )
    assert workers[0].pull(0, [1]) == [-0.5]


def test_optimizers_do_not_wait_for_each_other() -> None:
    known = plan(optimizers=[OptimizerPlan("torch.optim.sgd.SGD", 1, True)] * 2)
    first, second = team(opened(known, deadline_s=0.2))
    answers = together(lambda: first.push(0), lambda: second.push(0, optimizer=1))
    assert all(isinstance(answer, DeadlineError) for answer in answers)
    assert "optimizer 0 waited 0.2 s for worker 1" in str(answers[0])


def test_a_skip_of_one_is_a_skip_for_all() -> None:
    workers = team(opened(plan()))
    answers = together(
        lambda: workers[0].push(0, {0: ([1], [1])}, [1, 1, 1], skip=True),
        lambda: workers[1].push(0, {0: ([1], [1])}, [1, 1, 1]),
    )
    assert [answer[0].applied for answer in answers] == [False, False]
    assert (workers[0].pull(0, [1]), workers[0].dense()) == ([0], [1, 1, 1])
    # the step counter may stay or go on
    together(
        lambda: workers[0].push(0, {0: ([1], [1])}), lambda: workers[1].push(1, {0: ([1], [1])})
    )
    assert workers[0].pull(0, [1]) == [-1]


def test_nan_of_one_is_an_error_for_all() -> None:
    workers = team(opened(plan()))
    answers = together(
        lambda: workers[0].push(0, {0: ([1], [1])}),
        lambda: workers[1].push(0, {0: ([1], [np.nan])}),
    )
    for answer in answers:
        assert isinstance(answer, GradientError)
        assert "worker 1 pushed a gradient (step 0) of table 'users'" in str(answer)
    assert workers[0].pull(0, [1]) == [0]
    # who catches the error may make the step once more
    both(workers, lambda w: w.push(0, {0: ([1], [1])}))
    assert workers[0].pull(0, [1]) == [-1]


def test_nan_of_one_may_be_a_skip_for_all() -> None:
    workers = team(opened(plan(on_nonfinite="skip")))
    answers = together(
        lambda: workers[0].push(0, {0: ([1], [1])}),
        lambda: workers[1].push(0, {0: ([1], [np.nan])}),
    )
    assert [answer[0].applied for answer in answers] == [False, False]
    assert workers[0].pull(0, [1]) == [0]


def test_an_error_in_a_step_is_told_to_all() -> None:
    workers = team(opened(plan()))
    answers = together(
        lambda: workers[0].push(0, {0: ([1], [1])}, options=[{"lr": "much"}]),
        lambda: workers[1].push(0, {0: ([1], [1])}, options=[{"lr": "much"}]),
    )
    assert all(isinstance(answer, Exception) for answer in answers)
    assert str(answers[0]) == str(answers[1])


# -- clipping by the norm over all servers --------------------------------------------------------


def test_held_gradients_are_applied_times_a_factor() -> None:
    workers = team(opened(plan()))
    answers = together(
        lambda: workers[0].push(0, {0: ([1, 1], [2, 4])}, [2, 0, 0], hold=True),
        lambda: workers[1].push(0, {0: ([1], [2])}, [4, 0, 0], hold=True),
    )
    # the mean gradient is 4 in both columns of row 1, and 3
    assert [answer[0].square for answer in answers] == [16 + 16 + 9] * 2
    assert (workers[0].pull(0, [1]), workers[0].dense()) == ([0], [1, 1, 1])
    (done, dense), _ = both(workers, lambda w: w.apply(0, 0.5))
    assert (done.applied, done.version, list(dense[0])) == (True, 1, [-0.5, 1, 1])
    assert workers[0].pull(0, [1]) == [-2]
    # the next step need not be clipped
    both(workers, lambda w: w.push(1, {0: ([1], [1])}))
    assert workers[0].pull(0, [1]) == [-3]


@pytest.mark.parametrize("refusal", ["", "worker 1 has NaN"])
def test_held_gradients_that_are_not_finite_are_refused_when_they_are_applied(refusal: str) -> None:
    """Not before: a loss scaler may still have the step skipped."""
    workers = team(opened(plan()))
    bad = {} if refusal else {0: ([1], [np.inf])}

    def hold(step: int) -> list[Any]:
        return together(
            lambda: workers[0].push(step, {0: ([1], [1])}, hold=True),
            lambda: workers[1].push(step, bad, hold=True, refusal=refusal),
        )

    assert [answer[0].square for answer in hold(0)] == [math.inf] * 2
    skipped = both(workers, lambda w: w.apply(0, 0.0, skip=w.index == 1))
    assert [answer[0].applied for answer in skipped] == [False, False]
    assert [answer[0].square for answer in hold(0)] == [math.inf] * 2
    for answer in together(*[lambda w=w: w.apply(0, 0.0) for w in workers]):
        assert isinstance(answer, GradientError)
        assert (refusal or "worker 1 pushed a gradient (step 0) of table 'users'") in str(answer)
    assert workers[0].pull(0, [1]) == [0]
    # the same step can be made again
    both(workers, lambda w: w.push(0, {0: ([1], [1])}))
    assert workers[0].pull(0, [1]) == [-1]


def test_a_refusal_of_a_worker_is_an_error_for_all() -> None:
    workers = team(opened(plan()))
    answers = together(
        lambda: workers[0].push(0, {0: ([1], [1])}, [1, 1, 1]),
        lambda: workers[1].push(0, refusal="worker 1 has NaN"),
    )
    assert [str(answer) for answer in answers] == ["worker 1 has NaN"] * 2
    assert all(isinstance(answer, GradientError) for answer in answers)
    assert (workers[0].pull(0, [1]), workers[0].dense()) == ([0], [1, 1, 1])


def test_gradients_that_are_held_may_be_replaced() -> None:
    """By another clipping, or by a step that is not clipped."""
    workers = team(opened(plan()))
    for value in (100, 2):
        both(workers, lambda w, v=value: w.push(0, {0: ([1], [v])}, hold=True))
    both(workers, lambda w: w.apply(0, 0.5))
    assert workers[0].pull(0, [1]) == [-1]
    with pytest.raises(ProtocolError, match=r"pushed step 0 .* expected step 1"):
        workers[0].push(0)
    both(workers, lambda w: w.push(1, {0: ([1], [100])}, hold=True))
    both(workers, lambda w: w.push(1, {0: ([1], [3])}))
    assert workers[0].pull(0, [1]) == [-4]
    with pytest.raises(ProtocolError, match="none are held"):
        workers[0].apply(1, 1.0)


def test_a_held_step_may_be_dropped() -> None:
    workers = team(opened(plan()))
    both(workers, lambda w: w.push(0, {0: ([1], [1])}, hold=True))
    answers = both(workers, lambda w: w.apply(0, 1.0, skip=w.index == 1))
    assert [answer[0].applied for answer in answers] == [False, False]
    assert workers[0].pull(0, [1]) == [0]
    with pytest.raises(ProtocolError, match=r"worker 0 applies .* none are held"):
        workers[0].apply(0, 1.0)
    both(workers, lambda w: w.push(0, {0: ([1], [1])}))


def test_a_norm_that_is_not_finite_is_infinite() -> None:
    workers = team(opened(plan(on_nonfinite="skip")))
    answers = both(
        workers, lambda w: w.push(0, {0: ([1], [np.nan if w.index else 1.0])}, hold=True)
    )
    assert [answer[0].square for answer in answers] == [math.inf, math.inf]
    assert not both(workers, lambda w: w.apply(0, 0.0))[0][0].applied
    assert workers[0].pull(0, [1]) == [0]


def test_workers_must_agree_on_clipping() -> None:
    workers = team(opened(plan()))
    with pytest.raises(PlanError, match="worker 1 clips the gradients, worker 0 does not"):
        both(workers, lambda w: w.push(0, hold=w.index == 1))
    both(workers, lambda w: w.push(0, hold=True))
    with pytest.raises(PlanError, match=r"different factors \(worker 0: 0\.5, worker 1: 1\.5\)"):
        both(workers, lambda w: w.apply(0, w.index + 0.5))


def test_who_clips_and_who_does_not_learn_of_it_before_the_others_come() -> None:
    workers = team(opened(plan(workers=3), deadline_s=20.0), 3)
    for answer in together(
        lambda: workers[0].push(0, hold=True), lambda: workers[1].push(0, {0: ([1], [1])})
    ):
        assert isinstance(answer, PlanError)
        assert "worker 0 clips the gradients, worker 1 does not" in str(answer)
    # so does whoever comes later; all may then make the step anew
    with pytest.raises(PlanError, match="worker 0 clips"):
        workers[2].push(0)
    both(workers, lambda w: w.push(0, {0: ([1], [3])}))
    assert workers[0].pull(0, [1]) == [-3]


def test_only_sync_mode_holds() -> None:
    worker = Worker(opened(plan("async", workers=1)), 0, 1)
    with pytest.raises(PlanError, match="only sync mode"):
        worker.push(0, hold=True)


# -- rows pulled ahead ----------------------------------------------------------------------------


def ahead(worker: Worker, table: int, ids: list[int], batch: int) -> list[float]:
    return worker.pull(table, ids, ahead=True, batch=batch)


def changes(answer: tuple[m.Pushed, list[Any]], dense: int = 1) -> list[tuple[Any, ...]]:
    """(table, batch, positions, first numbers) of each list."""
    message, arrays = answer
    positions, rows = arrays[dense::2], arrays[dense + 1 :: 2]
    return [
        (table, batch, where.tolist(), row[:, 0].tolist())
        for table, batch, where, row in zip(
            message.changed, message.batches, positions, rows, strict=True
        )
    ]


def test_rows_pulled_ahead_are_told_when_a_step_changes_them() -> None:
    first, second = team(opened(plan()))
    assert ahead(first, 0, [5, 6, 7, 8], batch=1) == [0, 0, 0, 0]
    assert ahead(first, 1, [5], batch=1) == [0]
    assert ahead(second, 0, [1], batch=1) == [0]
    one, two = together(
        lambda: first.push(0, {0: ([6], [2])}, [0, 0, 0]),
        lambda: second.push(0, {0: ([8, 9], [4, 4])}, [0, 0, 0]),
    )
    assert changes(one) == [(0, 1, [1, 3], [-1, -2])]
    assert changes(two) == []
    # once told they are forgotten
    one, _ = both([first, second], lambda w: w.push(1, {0: ([6], [2])}, wants_dense=False))
    assert changes(one, dense=0) == []


def test_a_push_that_comes_late_once_more_takes_no_rows_pulled_ahead() -> None:
    """By a connection that was given up; nobody waits for its answer."""
    worker, row = Worker(opened(plan(workers=1)), 0, 1), {0: ([6], [2])}
    late = worker.pushed(0, row, None)
    worker.send(late, row, None)
    worker.push(1, row)
    ahead(worker, 0, [6], batch=3)
    assert changes(worker.send(late, row, None)) == []
    assert changes(worker.push(2, row)) == [(0, 3, [0], [-6])]


def test_rows_pulled_ahead_wait_until_a_held_step_is_applied() -> None:
    workers = team(opened(plan()))
    ahead(workers[0], 0, [6], batch=3)
    one, _ = both(workers, lambda w: w.push(0, {0: ([6], [2])}, hold=True))
    assert changes(one) == []
    one, _ = both(workers, lambda w: w.apply(0, 0.5))
    assert changes(one) == [(0, 3, [0], [-1])]


def test_rows_pulled_ahead_wait_for_their_own_optimizer() -> None:
    known = plan(workers=1, optimizers=[OptimizerPlan("torch.optim.sgd.SGD", 1, True)] * 2)
    worker = Worker(opened(known), 0, 1)
    ahead(worker, 0, [6], batch=1)
    assert changes(worker.push(0, optimizer=1)) == []
    assert changes(worker.push(0, {0: ([6], [2])})) == [(0, 1, [0], [-2])]


def test_rows_pulled_ahead_during_a_step_are_told_as_well() -> None:
    """The list is kept before the rows are read: whatever they were, the answer is right."""
    first, second = team(opened(plan()))
    rows, one, _ = together(
        lambda: ahead(first, 0, [6], batch=2),
        lambda: first.push(0, {0: ([6], [2])}),
        lambda: second.push(0, {0: ([6], [2])}),
    )
    two, _ = both([first, second], lambda w: w.push(1, {}, None))
    told = changes(one) or changes(two)
    assert rows == [-2] or told == [(0, 2, [0], [-2])]


def test_many_steps_of_many_workers_equal_one_process() -> None:
    """Random ids and gradients, all threads at once; each row is as if added up by hand."""
    workers, steps = team(opened(plan(workers=3)), 3), 20
    chance = np.random.default_rng(0)
    ids = chance.integers(-3, 4, (3, steps, 6))
    numbers = chance.integers(-4, 5, (3, steps, 6)).astype(np.float32) * 3

    def run(worker: Worker) -> None:
        for step in range(steps):
            mine = ids[worker.index, step], numbers[worker.index, step]
            worker.pull(0, list(ids[worker.index, step]))
            answer, _ = worker.push(step, {0: mine}, [3, 0, 0], seen=step)
            assert answer.version == step + 1

    both(workers, run)
    expected = [-numbers[ids == i].sum() / 3 for i in range(-3, 4)]
    assert workers[0].pull(0, list(range(-3, 4))) == expected
    assert workers[0].dense() == [1 - 3 * steps, 1, 1]
    assert workers[0].server.figures().staleness == {0: 3 * steps}


def test_what_is_held_is_there_for_a_snapshot_until_it_is_released() -> None:
    workers = team(server := opened(plan("sync")))
    held = [worker.pushed(0, {0: None}, None, hold=True) for worker in workers]
    both(workers, lambda worker: worker.send(held[worker.index], {0: ([1], [4])}, None))
    assert server._service is not None
    pushes = server._service.pushes
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        with server._values_lock.exclusive():
            # as a snapshot is; all have said by which factor
            answers = [pool.submit(worker.apply, 0, 0.5) for worker in workers]
            while not pushes._coordinator._releases._complete:
                pass
            with server._changed:
                ((change, _),) = pushes.held_now()
                positions = pushes.baseline()[2].positions
            assert change.restated
            assert [count for _, _, _, count, _, _ in positions] == [0, 0]
        assert all(answer.result(20)[0].applied for answer in answers)
    assert workers[0].pull(0, [1]) == [-2]


def test_what_was_called_for_is_heard_by_all_behind_the_same_step() -> None:
    server = opened(plan(workers=3))
    workers = team(server, 3)
    answers = both(workers, lambda w: w.push(0, {0: ([1], [3])}))
    assert [answer[0].call for answer in answers] == [NO_SIGNAL] * 3
    beaten = workers[1].say(m.Heartbeat(1, ControlSignal(stop=True)))[0]
    assert (beaten.call, beaten.here) == (ControlSignal(stop=True), 3)
    workers[2].say(m.Heartbeat(1, ControlSignal(saves=2)))
    answers = both(workers, lambda w: w.push(1, {0: ([1], [3])}))
    assert [answer[0].call for answer in answers] == [ControlSignal(True, 2)] * 3
    # one that makes no more steps would not hear it
    workers[2].say(m.EndPhase(0))
    answers = both(workers[:2], lambda w: w.push(2, {0: ([1], [3])}))
    assert [answer[0].call for answer in answers] == [NO_SIGNAL] * 2


def test_a_server_that_is_to_stop_tells_the_workers() -> None:
    server = opened(plan())
    workers = team(server)
    server.call_stop()
    assert workers[0].say(m.Heartbeat(0))[0].call == ControlSignal(stop=True)
    answers = both(workers, lambda w: w.push(0, {0: ([1], [3])}))
    assert [answer[0].call for answer in answers] == [ControlSignal(stop=True)] * 2
    workers[0].say(m.Leave())
    assert not server.stopped
    assert workers[1].say(m.Heartbeat(1))[0].here == 1
    workers[1].say(m.Leave(stopped=True))
    assert server.stopped


def test_what_was_called_for_is_heard_behind_a_clipped_step_too() -> None:
    """Not when it is held: a worker that dies then makes it anew."""
    workers = team(opened(plan()))
    workers[1].say(m.Heartbeat(0, ControlSignal(saves=1)))
    answers = both(workers, lambda w: w.push(0, {0: ([1], [2])}, hold=True))
    assert [answer[0].call for answer in answers] == [NO_SIGNAL] * 2
    answers = both(workers, lambda w: w.apply(0, 0.5))
    assert [answer[0].call for answer in answers] == [ControlSignal(saves=1)] * 2
