# SPDX-License-Identifier: Apache-2.0
"""Pushes: applied once, in groups, and counted."""

import concurrent.futures
import dataclasses
import threading
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.errors import refuses
from tests.ps.serving import Worker, ids_of, opened, plan, rows_of, team, together

from fleetlight.errors import GradientError, PlanError, ProtocolError
from fleetlight.ps import messages as m
from fleetlight.ps.high_water_marks import HighWaterMarks
from fleetlight.ps.server.server import Server
from fleetlight.ps.server.steps.progress import Clocks, Versions
from fleetlight.ps.server.steps.request_dedup import RequestDedup
from fleetlight.ps.server.steps.step_groups import StepGroups
from fleetlight.ps.server.workers.presence import PresenceMonitor
from fleetlight.ps.server.workers.roster import Peer, Roster

# Pushes that are applied one by one (async, geo), and replies that all modes share.


def single_worker(mode: str = "async", **facts: Any) -> Worker:
    return Worker(opened(plan(mode, workers=1, **facts)), 0, 1)


def test_an_async_push_is_applied_at_once() -> None:
    first, second = team(opened(plan("async")))
    # repeated ids count once, with the sum of their gradients
    reply, (dense,) = first.push(0, {0: ([7, -1, 7], [1, 2, 3])}, [0.5, 0, 1])
    assert (reply.version, reply.applied, list(dense)) == (1, True, [0.5, 1, 0])
    assert second.pull(0, [7, -1, 5]) == [-4, -2, 0]
    assert second.dense() == [0.5, 1, 0]


def test_an_empty_push_counts_as_a_push() -> None:
    reply, arrays = single_worker().push(0, {0: ([], [])}, None, wants_dense=False)
    assert (reply.version, reply.slowest, arrays) == (1, 1, [])


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_a_repeated_push_is_applied_once(mode: str) -> None:
    worker = single_worker(mode)
    message, tables = worker.push_request(0, {0: None}, [1, 1, 1]), {0: ([7], [1])}
    first = worker.send(message, tables, [1, 1, 1])
    again = worker.send(message, tables, [1, 1, 1])
    assert worker.pull(0, [7]) == [-1]
    assert first[0] == again[0]
    np.testing.assert_array_equal(first[1], again[1])
    # the server still recognises it after a later push
    worker.push(1, {}, None)
    assert worker.send(message, tables, [1, 1, 1])[0].applied
    assert worker.pull(0, [7]) == [-1]


def test_a_repeat_of_a_push_in_progress_waits_for_the_same_reply() -> None:
    first, second = team(opened(plan()))
    message, tables = first.push_request(0, {0: None}, None), {0: ([7], [2])}
    sent = threading.Event()

    def again() -> Any:
        sent.set()
        return first.send(message, tables, None)

    def last() -> Any:
        sent.wait(20)
        return second.push(0, {0: ([7], [4])})

    reply, repeated, _ = together(lambda: first.send(message, tables, None), again, last)
    assert reply[0] == repeated[0]
    assert first.pull(0, [7]) == [-3]


def test_a_push_for_another_epoch_is_refused() -> None:
    worker = single_worker()
    with pytest.raises(ProtocolError, match="epoch 3, but this server is in epoch 0"):
        worker.push(0, epoch=3)


@pytest.mark.parametrize(("mode", "dense"), [("sync", [0, 1, 1]), ("async", [2, 1, 1])])
def test_dense_pushes_are_gradients_in_sync_and_deltas_in_async(
    mode: str, dense: list[int]
) -> None:
    worker = single_worker(mode)
    push_request = worker.push_request(0, {}, [1])
    worker.say(push_request, np.array([1, 0, 0], np.float32), lane="push")
    assert worker.dense() == dense


def test_a_step_uses_the_options_of_its_push() -> None:
    worker = single_worker("sync")
    worker.push(0, {0: ([7], [1])}, [1, 0, 0], options=[{"lr": 0.25, "weight_decay": 0.0}])
    assert worker.pull(0, [7]) == [-0.25]
    assert worker.dense() == [0.75, 1, 1]
    with pytest.raises(PlanError, match="options of 2 param groups of optimizer 0, expected 1"):
        worker.push(1, options=[{"lr": 1.0}, {"lr": 1.0}])
    with pytest.raises(ProtocolError, match="optimizer 4, but the plan has 1"):
        worker.push(1, optimizer=4)


@pytest.mark.parametrize(
    ("arrays", "text"),
    [
        ([ids_of([1]), np.zeros((1, 9), np.float32)], r"rows .*float32\[1, 9\].*float32\[1, 2\]"),
        ([ids_of([1]), rows_of([1]), rows_of([1])], "came with 3 arrays, expected 2"),
        ([ids_of([1])], "the rows of table 'users' are missing"),
    ],
)
def test_arrays_of_the_wrong_shape_are_refused(arrays: list[Any], text: str) -> None:
    worker = single_worker()
    message = worker.push_request(0, {0: None}, None)
    with pytest.raises((PlanError, ProtocolError), match=text):
        worker.say(message, *arrays, lane="push")
    message = msgspec.structs.replace(message, tables=[], dense=True, sequence=9)
    with pytest.raises(PlanError, match=r"float32\[4\], expected float32\[3\]"):
        worker.say(message, np.zeros(4, np.float32), lane="push")


# -- gradients that are not finite --------------------------------------------------------------


def test_nan_is_refused_by_table_name_and_not_applied() -> None:
    worker = single_worker()
    with pytest.raises(GradientError, match=r"worker 0 .*step 0.* table 'items' with NaN"):
        worker.push(0, {0: ([1], [1]), 1: ([1], [np.nan])}, [1, 1, 1])
    with pytest.raises(GradientError, match="parameter 'bias'"):
        worker.push(0, {0: ([1], [1])}, [1, np.inf, 1])
    assert (worker.pull(0, [1]), worker.dense()) == ([0], [1, 1, 1])


def test_nan_may_be_skipped_or_applied() -> None:
    worker = single_worker(on_nonfinite="skip")
    reply, _ = worker.push(0, {0: ([1], [np.nan])}, [1, 1, 1])
    assert (reply.applied, reply.version, reply.slowest) == (False, 0, 1)
    assert (worker.pull(0, [1]), worker.dense()) == ([0], [1, 1, 1])
    worker = single_worker(on_nonfinite="apply")
    assert worker.push(0, {0: ([1], [np.nan])})[0].applied
    assert np.isnan(worker.pull(0, [1])).all()


def test_a_skipped_push_is_not_applied() -> None:
    worker = single_worker()
    # a push that the loss scaler skips is not checked again
    reply, _ = worker.push(0, {0: ([1], [np.inf])}, [1, 1, 1], skip=True)
    assert (reply.applied, worker.pull(0, [1]), worker.dense()) == (False, [0], [1, 1, 1])


# -- bounded staleness ----------------------------------------------------------------------------


def test_a_pull_waits_for_the_slowest_worker() -> None:
    first, second = team(opened(plan("async", staleness=1)))
    first.push(0, {0: ([7], [1])})
    rows, _ = together(
        lambda: first.pull(0, [7], at_least=1), lambda: second.push(0, {0: ([7], [2])})
    )
    assert rows == [-3]


def test_a_merged_push_counts_for_all_its_steps() -> None:
    first, second = team(opened(plan("async")))
    first.push(2, merged=3)
    assert second.push(0)[0].slowest == 1
    assert second.push(3, merged=3)[0].slowest == 3


def test_a_worker_that_ended_its_phase_is_not_awaited() -> None:
    first, second = team(opened(plan("async", staleness=0)))
    first.push(0)
    rows, _ = together(
        lambda: first.pull(0, [7], at_least=1), lambda: second.say(m.EndPhase(phase=0))
    )
    assert rows == [0]
    # after the barrier it counts again
    rows, _ = together(
        lambda: first.pull(0, [7], at_least=1, phase=1),
        lambda: [w.push(1, {0: ([7], [1])}, phase=1) for w in (second, first)],
    )
    assert rows == [-2]


def test_a_waiting_pull_sees_the_last_step_of_a_stopping_worker() -> None:
    first, second = team(opened(plan("async", staleness=0)))
    first.push(0)

    def stop() -> None:
        second.say(m.Heartbeat(0, stops=True))
        second.push(0, {0: ([7], [1])})

    rows, _ = together(lambda: first.pull(0, [7], at_least=1), stop)
    assert rows == [-1]


def test_staleness_is_measured() -> None:
    server = opened(plan("async"))
    first, second = team(server)
    first.push(0, seen=0)
    first.push(1, seen=0)
    second.push(0, seen=0)
    second.push(1, seen=3)
    assert server.metrics().staleness == {0: 2, 1: 1, 2: 1}
    assert server.metrics().pushes == 4


# -- geo ------------------------------------------------------------------------------------------


def exchange(worker: Worker, ids: list[int], numbers: list[float], **facts: Any) -> list[Any]:
    worker.sequence += 1
    usual: dict[str, Any] = {"sequence": worker.sequence, "wants": True}
    message = m.GeoExchange(epoch=0, step=4, tables=[0], dense=True, **{**usual, **facts})
    arrays = [ids_of(ids), rows_of(numbers), np.array([1, 0, -1], np.float32)]
    return worker.say(message, *arrays, lane="push")[1]


def test_an_exchange_adds_differences_and_returns_current_values() -> None:
    first, second = team(opened(plan("geo")))
    exchange(first, [1, 2], [10, 20])
    rows, dense = exchange(second, [2, 3], [1, 2])
    assert (rows[:, 0].tolist(), dense.tolist()) == ([21, 2], [3, 1, -1])
    assert exchange(first, [3], [1], wants=False) == []
    assert first.pull(0, [1, 2, 3]) == [10, 21, 3]


def test_parts_of_an_exchange_count_as_one_push() -> None:
    worker = single_worker("geo")
    for more in (True, True, False):
        exchange(worker, [1], [10], more=more)
    assert worker.say(m.MetricsRequest())[0].pushes == 1  # type: ignore[attr-defined]
    assert worker.pull(0, [1]) == [30]


def test_a_repeated_exchange_is_added_once() -> None:
    worker = single_worker("geo")
    exchange(worker, [1], [10])
    rows, dense = exchange(worker, [1], [10], sequence=0)
    assert (rows[:, 0].tolist(), dense.tolist()) == ([10], [2, 1, 0])


def test_nonfinite_differences_are_refused() -> None:
    worker = single_worker("geo")
    with pytest.raises(GradientError, match=r"sent a difference .* table 'users'"):
        exchange(worker, [1], [np.nan])
    assert worker.pull(0, [1]) == [0]
    with pytest.raises(PlanError, match="exchanges differences, but the mode is 'async'"):
        exchange(single_worker(), [1], [1])


# StepGroups: which pushes form one step, also when workers have uneven data.


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
    assert groups.add(0, 0, 0, 1, "b") is not None
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
    with refuses(ProtocolError, f"pushed step {step} ", "after step 0, expected step 1"):
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


# Clocks: which workers are behind. Versions: the staleness of each gradient.


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


# RequestDedup: a late push over an abandoned connection does not disturb newer ones.


GRADIENTS = {0: ([1], [4])}


def test_a_late_push_does_not_hide_a_later_request() -> None:
    server = opened(plan("sync"))
    first, second = team(server)
    held = [worker.push_request(0, {0: None}, None, hold=True) for worker in (first, second)]
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        list(
            pool.map(
                lambda pair: pair[0].send(pair[1], GRADIENTS, None),
                zip((first, second), held, strict=True),
            )
        )
        early = pool.submit(second.apply, 0, 0.5)
        while not _waits(server):
            pass
        # the push is repeated long after its reply, and then the factor, too
        with pytest.raises(ProtocolError, match="push 0 of worker 1 arrived after its push 1"):
            second.send(held[1], GRADIENTS, None)
        second.sequence -= 1
        reply_again = pool.submit(second.apply, 0, 0.5)
        first.apply(0, 0.5)
        for reply in (early.result(20), reply_again.result(20)):
            assert reply[0].applied
    assert first.pull(0, [1]) == [-2]
    server.close()


def _waits(server: Server) -> bool:
    assert server._service is not None
    with server._changed:
        return bool(server._service.pushes.awaited_by(1))


def test_a_finished_request_forgets_only_its_own_record() -> None:
    presence = PresenceMonitor(Roster(0, 1, 1, ""), 1, 20.0, lambda: 0.0)
    dedup = RequestDedup(presence, HighWaterMarks())
    peer = Peer(0, 1, "push")

    def exchange(sequence: int, act: Any) -> None:
        message = m.GeoExchange(sequence, 0, 0, [], False)
        dedup.once(peer, message, act, lambda _: (m.Done(), []), keep=False)

    def next_one() -> tuple[m.Message, list[Any]]:
        return m.GeoExchangeReply(1, 1), []

    def slow() -> tuple[m.Message, list[Any]]:
        # the repeated request already has the reply, and the next one is in progress
        dedup._requests[0] = dataclasses.replace(dedup._requests[0], sequence=2)
        return next_one()

    exchange(1, slow)
    assert dedup._requests[0].sequence == 2


def test_a_push_from_before_a_restart_is_answered_once() -> None:
    """It arrives twice, but its reply consumes the rows that the worker has prefetched."""
    presence = PresenceMonitor(Roster(0, 1, 1, ""), 1, 20.0, lambda: 0.0)
    marks, peer = HighWaterMarks(), Peer(0, 1, "push")
    dedup = RequestDedup(presence, marks)
    calls: list[bool] = []

    def ask(sequence: int) -> m.Message:
        def reply_again(is_last: bool) -> tuple[m.Message, list[Any]]:
            calls.append(is_last)
            return m.GeoExchangeReply(len(calls), 0), []

        message = m.GeoExchange(sequence, 0, 0, [], False)
        reply: m.Message = dedup.once(peer, message, lambda: (m.Done(), []), reply_again)[0]
        return reply

    marks.applied(0, 1, 2)
    assert ask(2) == ask(2) == m.GeoExchangeReply(1, 0)
    # no worker waits for the push before it
    assert ask(1) == m.GeoExchangeReply(2, 0)
    assert calls == [True, False]
