# SPDX-License-Identifier: Apache-2.0
"""Steps of sync jobs."""

import concurrent.futures
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.ps.restartable import RestartableCluster
from tests.ps.serving import OPTIONS, Worker, of_all, opened, plan, team, together

from fleetlight.errors import DeadlineError, GradientError, PlanError, ProtocolError
from fleetlight.ps import messages as m
from fleetlight.ps.plan import OptimizerPlan
from fleetlight.ps.server.steps.prefetched_ids import PrefetchedBatch, PrefetchedIds
from fleetlight.wire.control_signals import NO_SIGNAL, ControlSignal

# Synchronous steps: means, uneven data, skips, clipping, prefetched rows.


def call_all(workers: list[Worker], call: Callable[[Worker], Any]) -> list[Any]:
    """The replies when all workers make the same call."""
    replies = of_all(workers, call)
    for reply in replies:
        if isinstance(reply, Exception):
            raise reply
    return replies


def test_a_step_applies_the_mean_over_all_workers() -> None:
    first, second = team(opened(plan()))
    first_reply, second_reply = together(
        lambda: first.push(0, {0: ([1, 2, 1], [1, 2, 3])}, [1, 0, 0]),
        lambda: second.push(0, {0: ([2], [4])}, [1, 1, 0]),
    )
    # divided by the workers, not by those that touched the row
    assert first.pull(0, [1, 2]) == [-2, -3]
    assert first.dense() == [0, 0.5, 1]
    assert first_reply[0] == second_reply[0]
    assert first_reply[0].version == 1
    np.testing.assert_array_equal(first_reply[1], second_reply[1])


def test_workers_that_run_out_of_data_leave_the_step() -> None:
    workers = team(opened(plan(workers=3)), 3)
    call_all(workers, lambda w: w.push(0, {0: ([1], [3])}))
    replies = together(
        lambda: workers[0].push(1, {0: ([1], [4])}),
        lambda: workers[1].push(1, {0: ([1], [2])}),
        lambda: workers[2].say(m.EndPhase(0)),
    )
    assert replies[0][0].version == 2
    assert workers[0].pull(0, [1]) == [-6]
    together(lambda: workers[0].push(2, {0: ([1], [1])}), lambda: workers[1].say(m.Leave()))
    assert workers[0].pull(0, [1]) == [-7]


def test_a_step_uses_the_options_of_the_latest_worker_step() -> None:
    workers = team(opened(plan()))
    together(
        lambda: workers[0].push(3, {0: ([1], [1])}, options=[{"lr": 100.0}]),
        lambda: workers[1].push(7, {0: ([1], [1])}, options=[{"lr": 0.5}]),
    )
    assert workers[0].pull(0, [1]) == [-0.5]


def test_optimizers_do_not_wait_for_each_other() -> None:
    known = plan(optimizers=[OptimizerPlan("torch.optim.sgd.SGD", 1, True)] * 2)
    first, second = team(opened(known, deadline_s=0.2))
    replies = together(lambda: first.push(0), lambda: second.push(0, optimizer=1))
    assert all(isinstance(reply, DeadlineError) for reply in replies)
    assert "optimizer 0 waited 0.2 s for worker 1" in str(replies[0])


def test_a_skip_by_one_worker_skips_the_step_for_all() -> None:
    workers = team(opened(plan()))
    replies = of_all(workers, lambda w: w.push(0, {0: ([1], [1])}, [1, 1, 1], skip=w.index == 0))
    assert [reply[0].applied for reply in replies] == [False, False]
    assert (workers[0].pull(0, [1]), workers[0].dense()) == ([0], [1, 1, 1])
    # the step counter of a worker may stay or advance
    of_all(workers, lambda w: w.push(w.index, {0: ([1], [1])}))
    assert workers[0].pull(0, [1]) == [-1]


def test_nan_from_one_worker_is_an_error_for_all() -> None:
    workers = team(opened(plan()))
    replies = of_all(workers, lambda w: w.push(0, {0: ([1], [np.nan if w.index else 1])}))
    for reply in replies:
        assert isinstance(reply, GradientError)
        assert "worker 1 pushed a gradient (step 0) of table 'users'" in str(reply)
    assert workers[0].pull(0, [1]) == [0]
    # a worker that catches the error may repeat the step
    call_all(workers, lambda w: w.push(0, {0: ([1], [1])}))
    assert workers[0].pull(0, [1]) == [-1]


def test_nan_from_one_worker_may_skip_the_step_for_all() -> None:
    workers = team(opened(plan(on_nonfinite="skip")))
    replies = of_all(workers, lambda w: w.push(0, {0: ([1], [np.nan if w.index else 1])}))
    assert [reply[0].applied for reply in replies] == [False, False]
    assert workers[0].pull(0, [1]) == [0]


def test_an_error_in_a_step_reaches_all_workers() -> None:
    workers = team(opened(plan()))
    replies = of_all(workers, lambda w: w.push(0, {0: ([1], [1])}, options=[{"lr": "much"}]))
    assert all(isinstance(reply, Exception) for reply in replies)
    assert str(replies[0]) == str(replies[1])


# -- clipping by the norm over all servers --------------------------------------------------------


def test_held_gradients_are_scaled_by_the_clip_factor() -> None:
    workers = team(opened(plan()))
    replies = together(
        lambda: workers[0].push(0, {0: ([1, 1], [2, 4])}, [2, 0, 0], hold=True),
        lambda: workers[1].push(0, {0: ([1], [2])}, [4, 0, 0], hold=True),
    )
    # the mean gradient is 4 in both columns of row 1, and 3
    assert [reply[0].square for reply in replies] == [16 + 16 + 9] * 2
    assert (workers[0].pull(0, [1]), workers[0].dense()) == ([0], [1, 1, 1])
    (done, dense), _ = call_all(workers, lambda w: w.apply(0, 0.5))
    assert (done.applied, done.version, list(dense[0])) == (True, 1, [-0.5, 1, 1])
    assert workers[0].pull(0, [1]) == [-2]
    # the next step need not be clipped
    call_all(workers, lambda w: w.push(1, {0: ([1], [1])}))
    assert workers[0].pull(0, [1]) == [-3]


@pytest.mark.parametrize("refusal", ["", "worker 1 has NaN"])
def test_nonfinite_held_gradients_are_refused_when_applied(refusal: str) -> None:
    """Not earlier, because a loss scaler may still skip the step."""
    workers = team(opened(plan()))
    bad = {} if refusal else {0: ([1], [np.inf])}

    def hold(step: int) -> list[Any]:
        return together(
            lambda: workers[0].push(step, {0: ([1], [1])}, hold=True),
            lambda: workers[1].push(step, bad, hold=True, refusal=refusal),
        )

    assert [reply[0].square for reply in hold(0)] == [math.inf] * 2
    skipped = call_all(workers, lambda w: w.apply(0, 0.0, skip=w.index == 1))
    assert [reply[0].applied for reply in skipped] == [False, False]
    assert [reply[0].square for reply in hold(0)] == [math.inf] * 2
    for reply in of_all(workers, lambda w: w.apply(0, 0.0)):
        assert isinstance(reply, GradientError)
        assert (refusal or "worker 1 pushed a gradient (step 0) of table 'users'") in str(reply)
    assert workers[0].pull(0, [1]) == [0]
    # the same step can be made again
    call_all(workers, lambda w: w.push(0, {0: ([1], [1])}))
    assert workers[0].pull(0, [1]) == [-1]


def test_a_refusal_by_one_worker_is_an_error_for_all() -> None:
    workers = team(opened(plan()))
    replies = together(
        lambda: workers[0].push(0, {0: ([1], [1])}, [1, 1, 1]),
        lambda: workers[1].push(0, refusal="worker 1 has NaN"),
    )
    assert [str(reply) for reply in replies] == ["worker 1 has NaN"] * 2
    assert all(isinstance(reply, GradientError) for reply in replies)
    assert (workers[0].pull(0, [1]), workers[0].dense()) == ([0], [1, 1, 1])


def test_held_gradients_may_be_replaced() -> None:
    """By another clipped push of the same step, or by an unclipped one."""
    workers = team(opened(plan()))
    for value in (100, 2):
        call_all(workers, lambda w, v=value: w.push(0, {0: ([1], [v])}, hold=True))
    call_all(workers, lambda w: w.apply(0, 0.5))
    assert workers[0].pull(0, [1]) == [-1]
    with pytest.raises(ProtocolError, match=r"pushed step 0 .* expected step 1"):
        workers[0].push(0)
    call_all(workers, lambda w: w.push(1, {0: ([1], [100])}, hold=True))
    call_all(workers, lambda w: w.push(1, {0: ([1], [3])}))
    assert workers[0].pull(0, [1]) == [-4]
    with pytest.raises(ProtocolError, match="none are held"):
        workers[0].apply(1, 1.0)


def test_a_held_step_may_be_dropped() -> None:
    workers = team(opened(plan()))
    call_all(workers, lambda w: w.push(0, {0: ([1], [1])}, hold=True))
    replies = call_all(workers, lambda w: w.apply(0, 1.0, skip=w.index == 1))
    assert [reply[0].applied for reply in replies] == [False, False]
    assert workers[0].pull(0, [1]) == [0]
    with pytest.raises(ProtocolError, match=r"worker 0 applies .* none are held"):
        workers[0].apply(0, 1.0)
    call_all(workers, lambda w: w.push(0, {0: ([1], [1])}))


def test_a_nan_norm_is_reported_as_infinite() -> None:
    workers = team(opened(plan(on_nonfinite="skip")))
    replies = call_all(
        workers, lambda w: w.push(0, {0: ([1], [np.nan if w.index else 1.0])}, hold=True)
    )
    assert [reply[0].square for reply in replies] == [math.inf, math.inf]
    assert not call_all(workers, lambda w: w.apply(0, 0.0))[0][0].applied
    assert workers[0].pull(0, [1]) == [0]


def test_workers_must_agree_on_clipping() -> None:
    workers = team(opened(plan()))
    with pytest.raises(PlanError, match="worker 1 clips the gradients, worker 0 does not"):
        call_all(workers, lambda w: w.push(0, hold=w.index == 1))
    call_all(workers, lambda w: w.push(0, hold=True))
    with pytest.raises(PlanError, match=r"different factors \(worker 0: 0\.5, worker 1: 1\.5\)"):
        call_all(workers, lambda w: w.apply(0, w.index + 0.5))


def test_disagreement_on_clipping_fails_before_all_have_pushed() -> None:
    workers = team(opened(plan(workers=3), deadline_s=20.0), 3)
    for reply in together(
        lambda: workers[0].push(0, hold=True), lambda: workers[1].push(0, {0: ([1], [1])})
    ):
        assert isinstance(reply, PlanError)
        assert "worker 0 clips the gradients, worker 1 does not" in str(reply)
    # a worker that pushes later fails, too; then all may repeat the step
    with pytest.raises(PlanError, match="worker 0 clips"):
        workers[2].push(0)
    call_all(workers, lambda w: w.push(0, {0: ([1], [3])}))
    assert workers[0].pull(0, [1]) == [-3]


def test_only_sync_mode_holds_gradients() -> None:
    worker = Worker(opened(plan("async", workers=1)), 0, 1)
    with pytest.raises(PlanError, match="only sync mode"):
        worker.push(0, hold=True)


# -- prefetched rows ------------------------------------------------------------------------------


def prefetch(worker: Worker, table: int, ids: list[int], batch: int) -> list[float]:
    return worker.pull(table, ids, ahead=True, batch=batch)


def changes(reply: tuple[m.Pushed, list[Any]], dense: int = 1) -> list[tuple[Any, ...]]:
    """(table, batch, positions, first values) of each list."""
    message, arrays = reply
    positions, rows = arrays[dense::2], arrays[dense + 1 :: 2]
    return [
        (table, batch, where.tolist(), row[:, 0].tolist())
        for table, batch, where, row in zip(
            message.changed, message.batches, positions, rows, strict=True
        )
    ]


def test_a_step_returns_the_prefetched_rows_it_changes() -> None:
    first, second = team(opened(plan()))
    assert prefetch(first, 0, [5, 6, 7, 8], batch=1) == [0, 0, 0, 0]
    assert prefetch(first, 1, [5], batch=1) == [0]
    assert prefetch(second, 0, [1], batch=1) == [0]
    first_reply, second_reply = together(
        lambda: first.push(0, {0: ([6], [2])}, [0, 0, 0]),
        lambda: second.push(0, {0: ([8, 9], [4, 4])}, [0, 0, 0]),
    )
    assert changes(first_reply) == [(0, 1, [1, 3], [-1, -2])]
    assert changes(second_reply) == []
    # changes are reported once
    first_reply, _ = call_all(
        [first, second], lambda w: w.push(1, {0: ([6], [2])}, wants_dense=False)
    )
    assert changes(first_reply, dense=0) == []


def test_a_late_repeated_push_consumes_no_prefetched_rows() -> None:
    """It arrives over an abandoned connection, and no worker waits for its reply."""
    worker, row = Worker(opened(plan(workers=1)), 0, 1), {0: ([6], [2])}
    late = worker.push_request(0, row, None)
    worker.send(late, row, None)
    worker.push(1, row)
    prefetch(worker, 0, [6], batch=3)
    assert changes(worker.send(late, row, None)) == []
    assert changes(worker.push(2, row)) == [(0, 3, [0], [-6])]


def test_prefetched_rows_wait_until_a_held_step_is_applied() -> None:
    workers = team(opened(plan()))
    prefetch(workers[0], 0, [6], batch=3)
    first_reply, _ = call_all(workers, lambda w: w.push(0, {0: ([6], [2])}, hold=True))
    assert changes(first_reply) == []
    first_reply, _ = call_all(workers, lambda w: w.apply(0, 0.5))
    assert changes(first_reply) == [(0, 3, [0], [-1])]


def test_prefetched_rows_wait_for_their_own_optimizer() -> None:
    known = plan(workers=1, optimizers=[OptimizerPlan("torch.optim.sgd.SGD", 1, True)] * 2)
    worker = Worker(opened(known), 0, 1)
    prefetch(worker, 0, [6], batch=1)
    assert changes(worker.push(0, optimizer=1)) == []
    assert changes(worker.push(0, {0: ([6], [2])})) == [(0, 1, [0], [-2])]


def test_rows_prefetched_during_a_step_are_reported_as_well() -> None:
    """The server remembers the ids before it reads the rows, so either reply is right."""
    first, second = team(opened(plan()))
    rows, first_reply, _ = together(
        lambda: prefetch(first, 0, [6], batch=2),
        lambda: first.push(0, {0: ([6], [2])}),
        lambda: second.push(0, {0: ([6], [2])}),
    )
    second_reply, _ = call_all([first, second], lambda w: w.push(1, {}, None))
    changed = changes(first_reply) or changes(second_reply)
    assert rows == [-2] or changed == [(0, 2, [0], [-2])]


def test_concurrent_steps_equal_the_sum_computed_by_hand() -> None:
    """Random ids and gradients from concurrent threads."""
    workers, steps = team(opened(plan(workers=3)), 3), 20
    rng = np.random.default_rng(0)
    ids = rng.integers(-3, 4, (3, steps, 6))
    numbers = rng.integers(-4, 5, (3, steps, 6)).astype(np.float32) * 3

    def run(worker: Worker) -> None:
        for step in range(steps):
            mine = ids[worker.index, step], numbers[worker.index, step]
            worker.pull(0, list(ids[worker.index, step]))
            reply, _ = worker.push(step, {0: mine}, [3, 0, 0], seen=step)
            assert reply.version == step + 1

    call_all(workers, run)
    expected = [-numbers[ids == i].sum() / 3 for i in range(-3, 4)]
    assert workers[0].pull(0, list(range(-3, 4))) == expected
    assert workers[0].dense() == [1 - 3 * steps, 1, 1]
    assert workers[0].server.metrics().staleness == {0: 3 * steps}


def test_held_gradients_stay_in_snapshots_until_released() -> None:
    workers = team(server := opened(plan("sync")))
    held = [worker.push_request(0, {0: None}, None, hold=True) for worker in workers]
    call_all(workers, lambda worker: worker.send(held[worker.index], {0: ([1], [4])}, None))
    assert server._service is not None
    pushes = server._service.pushes
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        with server._values_lock.exclusive():
            # as during a snapshot; all workers have sent their factor
            replies = [pool.submit(worker.apply, 0, 0.5) for worker in workers]
            while not pushes._coordinator._releases._complete:
                pass
            with server._changed:
                ((change, _),) = pushes.held_now()
                positions = pushes.baseline()[2].positions
            assert change.restated
            assert [count for _, _, _, count, _, _ in positions] == [0, 0]
        assert all(reply.result(20)[0].applied for reply in replies)
    assert workers[0].pull(0, [1]) == [-2]


def test_all_workers_receive_a_signal_after_the_same_step() -> None:
    workers = team(opened(plan(workers=3)), 3)
    replies = call_all(workers, lambda w: w.push(0, {0: ([1], [3])}))
    assert [reply[0].call for reply in replies] == [NO_SIGNAL] * 3
    heartbeat_reply = workers[1].say(m.Heartbeat(1, ControlSignal(stop=True)))[0]
    assert (heartbeat_reply.call, heartbeat_reply.here) == (ControlSignal(stop=True), 3)
    workers[2].say(m.Heartbeat(1, ControlSignal(saves=2)))
    replies = call_all(workers, lambda w: w.push(1, {0: ([1], [3])}))
    assert [reply[0].call for reply in replies] == [ControlSignal(True, 2)] * 3
    # a worker that makes no more steps would not receive it
    workers[2].say(m.EndPhase(0))
    replies = call_all(workers[:2], lambda w: w.push(2, {0: ([1], [3])}))
    assert [reply[0].call for reply in replies] == [NO_SIGNAL] * 2


def test_a_stop_of_the_server_reaches_the_workers() -> None:
    server = opened(plan())
    workers = team(server)
    server.call_stop()
    assert workers[0].say(m.Heartbeat(0))[0].call == ControlSignal(stop=True)
    replies = call_all(workers, lambda w: w.push(0, {0: ([1], [3])}))
    assert [reply[0].call for reply in replies] == [ControlSignal(stop=True)] * 2
    workers[0].say(m.Leave())
    assert not server.stopped
    assert workers[1].say(m.Heartbeat(1))[0].here == 1
    workers[1].say(m.Leave(stopped=True))
    assert server.stopped


def test_a_clipped_step_delivers_the_signal_when_applied() -> None:
    """Not when it is held, because a worker that crashes then repeats the push."""
    workers = team(opened(plan()))
    workers[1].say(m.Heartbeat(0, ControlSignal(saves=1)))
    replies = call_all(workers, lambda w: w.push(0, {0: ([1], [2])}, hold=True))
    assert [reply[0].call for reply in replies] == [NO_SIGNAL] * 2
    replies = call_all(workers, lambda w: w.apply(0, 0.5))
    assert [reply[0].call for reply in replies] == [ControlSignal(saves=1)] * 2


# The ids of cached tables that other workers have changed, in the replies of a sync step.


#: a worker keeps rows of table 0
ASKS = {"reports": [0]}


def outdated(reply: tuple[m.Pushed, list[Any]]) -> dict[int, list[int]]:
    """By table: the ids, which are the last arrays."""
    message, arrays = reply
    last = arrays[len(arrays) - len(message.outdated) :]
    return {n: sorted(ids.tolist()) for n, ids in zip(message.outdated, last, strict=True)}


def test_a_reply_has_the_ids_that_only_others_have_changed() -> None:
    first, second = team(opened(plan()))
    replies = together(
        lambda: first.push(0, {0: ([6, 7], [2, 2]), 1: ([1], [2])}, **ASKS),
        lambda: second.push(0, {0: ([7, 8, 9], [4, 4, 4]), 1: ([2], [2])}, reports=[1, 0]),
    )
    assert [outdated(reply) for reply in replies] == [{0: [8, 9]}, {0: [6], 1: [1]}]
    replies = together(lambda: first.push(1, {}, **ASKS), lambda: second.push(1, {0: ([3], [2])}))
    assert [outdated(reply) for reply in replies] == [{0: [3]}, {}]


def test_the_ids_follow_changed_rows_and_dense_values() -> None:
    first, second = team(opened(plan()))
    first.pull(0, [8], ahead=True, batch=1)
    reply, _ = together(
        lambda: first.push(0, {0: ([6], [2])}, [0, 0, 0], **ASKS),
        lambda: second.push(0, {0: ([8], [4])}, [0, 0, 0]),
    )
    message, (dense, positions, rows, ids) = reply
    assert (message.changed, message.outdated) == ([0], [0])
    assert (len(dense), positions.tolist(), rows.tolist()) == (3, [0], [[-2, -2]])
    assert ids.tolist() == [8]


def test_a_skipped_step_changes_no_rows() -> None:
    first, second = team(opened(plan()))
    replies = together(
        lambda: first.push(0, {}, skip=True, **ASKS),
        lambda: second.push(0, {0: ([8], [4])}, **ASKS),
    )
    assert [outdated(reply) for reply in replies] == [{0: []}] * 2


def test_a_released_step_names_all_its_ids() -> None:
    first, second = team(opened(plan()))
    replies = together(
        lambda: first.push(0, {0: ([6], [2])}, hold=True, **ASKS),
        lambda: second.push(0, {0: ([8], [4])}, hold=True, **ASKS),
    )
    assert [outdated(reply) for reply in replies] == [{0: []}] * 2
    replies = together(lambda: first.apply(0, 0.5, **ASKS), lambda: second.apply(0, 0.5, **ASKS))
    assert [outdated(reply) for reply in replies] == [{0: [6, 8]}] * 2


def test_a_server_that_does_not_know_the_ids_names_no_table() -> None:
    """It has lost its kept reply, as after a restart."""
    worker = Worker(server := opened(plan(workers=1)), 0, 1)
    push, rows = worker.push_request(0, {0: None}, None, **ASKS), {0: ([6], [2])}
    assert outdated(worker.send(push, rows, None)) == {0: []}
    # the kept reply is repeated
    assert outdated(worker.send(push, rows, None)) == {0: []}
    assert server._service is not None
    server._service.pushes._requests._requests.clear()
    assert outdated(worker.send(push, rows, None)) == {}
    assert worker.pull(0, [6]) == [-2]


def test_no_ids_travel_in_async_mode() -> None:
    """A push does not know which other ones were applied since the last one of its worker."""
    worker = Worker(opened(plan("async", workers=1)), 0, 1)
    assert outdated(worker.push(0, {0: ([6], [2])}, **ASKS)) == {}


# All workers of a step receive the same control signals, even if the server crashes.


@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("crash_after", [None, "snapshot"])
def test_a_repeated_push_returns_the_signal_of_its_step(
    tmp_path: Path, clips: bool, crash_after: str | None
) -> None:
    """The other worker has acted on the signal and waits for this worker."""
    cluster = RestartableCluster(tmp_path / "kept", plan("sync"))
    cluster.workers[0].say(m.Heartbeat(0, ControlSignal(saves=1)))
    gradients: dict[int, Any] = {0: ([1], [2])}
    last: list[Any] = [w.push_request(0, {0: None}, None, hold=clips) for w in cluster.workers]
    replies = cluster.send(last, gradients)
    if clips:
        gradients, last = {}, [m.Apply(1, 0, 0, 0, 0, 0.5, OPTIONS)] * 2
        replies = cluster.send(last, gradients)
    assert [reply.call for reply, _ in replies] == [ControlSignal(saves=1)] * 2
    # a later signal, which no worker has received
    cluster.workers[0].say(m.Heartbeat(1, ControlSignal(stop=True)))
    if crash_after is not None:
        assert cluster.durability.snapshot()
    cluster.restart()
    reply, _ = cluster.workers[1].send(last[1], gradients, None)
    assert (reply.applied, reply.call) == (True, ControlSignal(saves=1))
    cluster.close()


# PrefetchedIds: kept until the worker's next step of the table's optimizer.


def pulled(table: int, batch: int) -> PrefetchedBatch:
    return PrefetchedBatch(table, batch, np.arange(batch, dtype=np.int64))


def test_lists_are_taken_once_and_by_table() -> None:
    lists = PrefetchedIds()
    for table, batch in [(0, 1), (1, 1), (0, 2)]:
        lists.remember(0, pulled(table, batch))
    lists.remember(1, pulled(0, 9))
    assert [(t.table, t.batch) for t in lists.take(0, {0})] == [(0, 1), (0, 2)]
    assert lists.take(0, {0}) == []
    assert [(t.table, t.batch) for t in lists.take(0, {0, 1})] == [(1, 1)]
    assert [t.batch for t in lists.take(1, {0})] == [9]


def test_a_batch_of_the_same_number_replaces_the_first() -> None:
    lists = PrefetchedIds()
    first, second = pulled(0, 1), PrefetchedBatch(0, 1, np.array([7], np.int64))
    lists.remember(0, first)
    lists.remember(0, second)
    assert lists.take(0, {0}) == [second]


def test_prefetched_ids_of_a_worker_that_never_pushes_are_bounded() -> None:
    lists = PrefetchedIds()
    for batch in range(100):
        lists.remember(0, pulled(0, batch))
        lists.remember(0, pulled(1, batch))
    assert [t.batch for t in lists.take(0, {0})] == list(range(92, 100))
