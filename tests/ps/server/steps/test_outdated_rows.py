# SPDX-License-Identifier: Apache-2.0
"""The ids of cached tables that other workers have changed, in the replies of a sync step."""

from __future__ import annotations

from typing import Any

from tests.ps.serving import Worker, opened, plan, team, together

from fleetlight.ps import messages as m

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
