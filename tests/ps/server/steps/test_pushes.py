# SPDX-License-Identifier: Apache-2.0
"""Pushes that are applied one by one (async, geo), and replies that all modes share."""

from __future__ import annotations

import threading
from typing import Any

import msgspec
import numpy as np
import pytest
from tests.ps.serving import Worker, ids_of, opened, plan, rows_of, team, together

from fleetlight.errors import GradientError, PlanError, ProtocolError
from fleetlight.ps import messages as m


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
    worker = single_worker()
    reply, arrays = worker.push(0, {0: ([], [])}, None, wants_dense=False)
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
    server = opened(plan())
    first, second = team(server)
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
