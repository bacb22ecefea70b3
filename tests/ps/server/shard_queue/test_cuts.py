# SPDX-License-Identifier: Apache-2.0
"""ShardQueue.cut: a turn ends early, and the next one has exactly the records that are left."""

from __future__ import annotations

from typing import Any

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.ps.serving import ask

from fleetlight.ps.changes import ShardQueueState
from fleetlight.ps.messages import LeaseProgress
from fleetlight.ps.server.shard_queue.shard_queue import NOTHING, ShardQueue


def test_a_cut_turn_ends_with_its_leases_and_leaves_the_rest() -> None:
    queue = ShardQueue(2)
    assert (queue.deal(0, ask()), queue.deal(1, ask())) == ((0, 16), (16, 32))
    assert queue.may_cut(0)
    queue.cut(0)
    assert not queue.may_cut(0)
    # worker 0 has finished its range, and worker 1 has not
    assert queue.deal(0, ask(1, (1, 0), waits=True)) is None
    assert queue.left(0, 1) == []
    assert queue.deal(1, ask(1, (1, 0), waits=True)) == NOTHING
    assert queue.deal(0, ask(1, (1, 0), waits=True)) == NOTHING
    assert queue.left(0, 1) == [(32, 96)]
    assert queue.remaining(0, 1) == [(32, 96)]
    assert queue.is_unleased(0, 2)
    assert queue.deal(1, ask(turn=2, whole=[(32, 96)])) == (32, 48)
    assert not queue.is_unleased(0, 2)


def test_a_late_worker_learns_what_a_cut_turn_left() -> None:
    """It took no part in the turn, and must not take the epoch for over."""
    queue = ShardQueue(2)
    queue.deal(0, ask())
    queue.cut(0)
    assert queue.deal(0, ask(1, (1, 0), waits=True)) == NOTHING
    assert queue.deal(0, ask(turn=2, whole=[(16, 96)], back=2)) == (16, 32)
    assert queue.deal(1, ask()) == NOTHING
    assert queue.left(0, 1) == [(16, 96)]


def test_a_cut_turn_that_is_finished_leaves_nothing() -> None:
    queue = ShardQueue(2)
    queue.deal(0, ask(whole=[(0, 8)], batches=1))
    queue.cut(0)
    queue.reach(0, LeaseProgress(0, 1, (0, 4)))
    assert queue.left(0, 1) == [(4, 8)]


def test_records_that_a_worker_gives_back_are_left_over() -> None:
    queue = ShardQueue(2)
    queue.deal(0, ask())
    queue.deal(1, ask())
    queue.cut(0)
    queue.reach(1, LeaseProgress(0, 1, (0, 20), gives_back=True))
    queue.reach(0, LeaseProgress(0, 1, (1, 0)))
    assert queue.left(0, 1) == [(20, 96)]


def test_a_worker_that_waits_gets_records_in_the_next_turn_where_steps_are_common() -> None:
    queue = ShardQueue(2)
    queue.cuts_for_waiting = True
    whole: dict[str, Any] = {"whole": [(0, 8)], "batches": 1}
    assert (queue.deal(0, ask(**whole)), queue.deal(1, ask(**whole))) == ((0, 4), (4, 8))
    assert queue.deal(0, ask(1, (1, 0), waits=True, **whole)) is None
    queue.release(1)
    assert queue.deal(0, ask(1, (1, 0), waits=True, **whole)) == NOTHING
    assert queue.left(0, 1) == [(4, 8)]


def test_a_place_keeps_nothing_of_its_former_worker() -> None:
    queue = ShardQueue(2, 3)
    queue.deal(1, ask())
    queue.release(1)
    queue.join(1)
    assert queue.deal(1, ask()) == (0, 16)


def test_ranges_are_cut_for_the_workers_that_train() -> None:
    whole: dict[str, Any] = {"whole": [(0, 96)], "batches": 99}
    few, many = ShardQueue(1, 8), ShardQueue(1, 8)
    for worker in range(1, 8):
        many.join(worker)
    assert few.deal(0, ask(**whole)) == (0, 48)
    assert many.deal(0, ask(**whole)) == (0, 8)


@settings(max_examples=200)
@given(data=st.data())
def test_every_record_is_leased_once_whatever_is_cut(data: st.DataObject) -> None:
    """Workers finish ranges in any order; the queue is cut, saved and restored at any time."""
    queue, length = ShardQueue(3), 40
    turn, number, reached, whole = (
        dict.fromkeys(range(3), v) for v in (1, 0, (0, 0), [(0, length)])
    )
    hand: dict[int, tuple[int, int]] = {}
    trained: list[int] = []
    active = {0, 1, 2}
    while active:
        event = data.draw(st.sampled_from(["ask", "ask", "cut", "restore"]))
        if event == "cut" and queue.may_cut(0):
            queue.cut(0)
        elif event == "restore":
            state = msgspec.json.decode(msgspec.json.encode(queue.state()), type=ShardQueueState)
            queue = ShardQueue(3)
            queue.restore(state)
        worker = data.draw(st.sampled_from(sorted(active)))
        if worker in hand:
            start, stop = hand.pop(worker)
            trained += range(start, stop)
            number[worker] += 1
            reached[worker] = number[worker], 0
        request = ask(
            number[worker],
            reached[worker],
            turn=turn[worker],
            back=turn[worker],
            whole=whole[worker],
            batches=1,
            waits=True,
        )
        dealt = queue.deal(worker, request)
        if dealt == NOTHING:
            left = queue.left(0, turn[worker])
            if not left:
                active.discard(worker)
                continue
            turn[worker] += 1
            number[worker], reached[worker], whole[worker] = 0, (0, 0), left
        elif dealt is not None:
            hand[worker] = dealt
    assert sorted(trained) == list(range(length))


def test_a_turn_in_which_no_worker_could_join_is_not_cut_again() -> None:
    queue = ShardQueue(2)
    queue.admissions.skip((0, 1))
    queue.deal(0, ask())
    assert not queue.may_cut(0)
    queue.deal(0, ask(turn=2, back=2))
    assert queue.may_cut(0)


def test_a_worker_that_has_left_its_loop_early_is_in_a_later_turn() -> None:
    """The rest of the cut turn takes nothing from that turn."""
    queue = ShardQueue(2)
    queue.deal(0, ask(turn=10))
    queue.deal(1, ask(turn=10))
    queue.cut(0)
    queue.reach(1, LeaseProgress(0, 10, (0, 20), gives_back=True))
    later = ask(turn=20, epoch=1, back=20)
    assert queue.deal(1, later) == (0, 16)
    assert queue.deal(0, ask(1, (1, 0), turn=10, waits=True)) == NOTHING
    left = queue.left(0, 10)
    assert queue.deal(0, ask(turn=11, whole=left)) == (20, 36)
    assert queue.deal(1, later) == (0, 16)
