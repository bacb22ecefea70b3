# SPDX-License-Identifier: Apache-2.0
"""Pushes that are applied one by one (async, geo), and what all modes answer."""

from __future__ import annotations

import threading
from typing import Any

import msgspec
import numpy as np
import pytest
from tests.ps.serving import Worker, ids_of, opened, plan, rows_of, team, together

from fleetlight.errors import GradientError, PlanError, ProtocolError
from fleetlight.ps import messages as m


def alone(mode: str = "async", **facts: Any) -> Worker:
    return Worker(opened(plan(mode, workers=1, **facts)), 0, 1)


def test_a_push_is_applied_when_it_comes() -> None:
    first, second = team(opened(plan("async")))
    # repeated ids count once, with the sum of their gradients
    answer, (dense,) = first.push(0, {0: ([7, -1, 7], [1, 2, 3])}, [0.5, 0, 1])
    assert (answer.version, answer.applied, list(dense)) == (1, True, [0.5, 1, 0])
    assert second.pull(0, [7, -1, 5]) == [-4, -2, 0]
    assert second.dense() == [0.5, 1, 0]


def test_an_empty_push_is_a_push() -> None:
    worker = alone()
    answer, arrays = worker.push(0, {0: ([], [])}, None, wants_dense=False)
    assert (answer.version, answer.slowest, arrays) == (1, 1, [])


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_a_push_that_comes_twice_is_applied_once(mode: str) -> None:
    worker = alone(mode)
    message, tables = worker.pushed(0, {0: None}, [1, 1, 1]), {0: ([7], [1])}
    first = worker.send(message, tables, [1, 1, 1])
    again = worker.send(message, tables, [1, 1, 1])
    assert worker.pull(0, [7]) == [-1]
    assert first[0] == again[0]
    np.testing.assert_array_equal(first[1], again[1])
    # it is also known when another push has come since
    worker.push(1, {}, None)
    assert worker.send(message, tables, [1, 1, 1])[0].applied
    assert worker.pull(0, [7]) == [-1]


def test_a_push_sent_again_while_it_is_under_way_waits_for_the_same_answer() -> None:
    server = opened(plan())
    first, second = team(server)
    message, tables = first.pushed(0, {0: None}, None), {0: ([7], [2])}
    waits = threading.Event()

    def again() -> Any:
        waits.set()
        return first.send(message, tables, None)

    def last() -> Any:
        waits.wait(20)
        return second.push(0, {0: ([7], [4])})

    one, other, _ = together(lambda: first.send(message, tables, None), again, last)
    assert one[0] == other[0]
    assert first.pull(0, [7]) == [-3]


def test_other_lives_and_epochs_are_refused() -> None:
    worker = alone()
    with pytest.raises(ProtocolError, match="epoch 3, but this server is in epoch 0"):
        worker.push(0, epoch=3)


@pytest.mark.parametrize(("mode", "dense"), [("sync", [0, 1, 1]), ("async", [2, 1, 1])])
def test_dense_values_are_stepped_in_sync_and_added_to_else(mode: str, dense: list[int]) -> None:
    worker = alone(mode)
    pushed = worker.pushed(0, {}, [1])
    worker.say(pushed, np.array([1, 0, 0], np.float32), lane="push")
    assert worker.dense() == dense


def test_options_are_those_of_the_push() -> None:
    worker = alone("sync")
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
def test_arrays_that_do_not_fit_are_refused(arrays: list[Any], text: str) -> None:
    worker = alone()
    message = worker.pushed(0, {0: None}, None)
    with pytest.raises((PlanError, ProtocolError), match=text):
        worker.say(message, *arrays, lane="push")
    message = msgspec.structs.replace(message, tables=[], dense=True, sequence=9)
    with pytest.raises(PlanError, match=r"float32\[4\], expected float32\[3\]"):
        worker.say(message, np.zeros(4, np.float32), lane="push")


# -- gradients that are not finite --------------------------------------------------------------


def test_nan_is_refused_by_name_and_nothing_is_applied() -> None:
    worker = alone()
    with pytest.raises(GradientError, match=r"worker 0 .*step 0.* table 'items' with NaN"):
        worker.push(0, {0: ([1], [1]), 1: ([1], [np.nan])}, [1, 1, 1])
    with pytest.raises(GradientError, match="parameter 'bias'"):
        worker.push(0, {0: ([1], [1])}, [1, np.inf, 1])
    assert (worker.pull(0, [1]), worker.dense()) == ([0], [1, 1, 1])


def test_nan_may_be_skipped_or_applied() -> None:
    worker = alone(on_nonfinite="skip")
    answer, _ = worker.push(0, {0: ([1], [np.nan])}, [1, 1, 1])
    assert (answer.applied, answer.version, answer.slowest) == (False, 0, 1)
    assert (worker.pull(0, [1]), worker.dense()) == ([0], [1, 1, 1])
    worker = alone(on_nonfinite="apply")
    assert worker.push(0, {0: ([1], [np.nan])})[0].applied
    assert np.isnan(worker.pull(0, [1])).all()


def test_a_skip_is_no_step() -> None:
    worker = alone()
    # what a scaler has found is not looked at again
    answer, _ = worker.push(0, {0: ([1], [np.inf])}, [1, 1, 1], skip=True)
    assert (answer.applied, worker.pull(0, [1]), worker.dense()) == (False, [0], [1, 1, 1])


# -- bounded staleness ----------------------------------------------------------------------------


def test_a_pull_waits_for_the_slowest() -> None:
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


def test_who_has_no_more_data_holds_nobody_up() -> None:
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


def test_who_waits_for_a_step_of_one_that_stops_gets_its_values() -> None:
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
    assert server.figures().staleness == {0: 2, 1: 1, 2: 1}
    assert server.figures().pushes == 4


# -- geo ------------------------------------------------------------------------------------------


def exchange(worker: Worker, ids: list[int], numbers: list[float], **facts: Any) -> list[Any]:
    worker.sequence += 1
    usual: dict[str, Any] = {"sequence": worker.sequence, "wants": True}
    message = m.GeoExchange(epoch=0, step=4, tables=[0], dense=True, **{**usual, **facts})
    arrays = [ids_of(ids), rows_of(numbers), np.array([1, 0, -1], np.float32)]
    return worker.say(message, *arrays, lane="push")[1]


def test_differences_are_added_and_answered_with_what_is_there() -> None:
    first, second = team(opened(plan("geo")))
    exchange(first, [1, 2], [10, 20])
    rows, dense = exchange(second, [2, 3], [1, 2])
    assert (rows[:, 0].tolist(), dense.tolist()) == ([21, 2], [3, 1, -1])
    assert exchange(first, [3], [1], wants=False) == []
    assert first.pull(0, [1, 2, 3]) == [10, 21, 3]


def test_pieces_of_an_exchange_count_as_one_change() -> None:
    worker = alone("geo")
    for more in (True, True, False):
        exchange(worker, [1], [10], more=more)
    assert worker.say(m.FiguresRequest())[0].pushes == 1  # type: ignore[attr-defined]
    assert worker.pull(0, [1]) == [30]


def test_differences_that_come_twice_are_added_once() -> None:
    worker = alone("geo")
    exchange(worker, [1], [10])
    rows, dense = exchange(worker, [1], [10], sequence=0)
    assert (rows[:, 0].tolist(), dense.tolist()) == ([10], [2, 1, 0])


def test_differences_that_are_not_finite_are_refused() -> None:
    worker = alone("geo")
    with pytest.raises(GradientError, match=r"sent a difference .* table 'users'"):
        exchange(worker, [1], [np.nan])
    assert worker.pull(0, [1]) == [0]
    with pytest.raises(PlanError, match="exchanges differences, but the mode is 'async'"):
        exchange(alone(), [1], [1])
