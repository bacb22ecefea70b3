# SPDX-License-Identifier: Apache-2.0
"""ShardQueue: each record is trained once, whichever worker dies, leaves or asks again."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.ps.serving import ask

from fleetlight.errors import PlanError, ProtocolError
from fleetlight.ps.changes import ShardQueueState
from fleetlight.ps.messages import LeaseProgress
from fleetlight.ps.server.shard_queue.shard_queue import NOTHING, ShardQueue, described, joined


def test_ranges_are_whole_batches_in_order() -> None:
    queue = ShardQueue(2)
    assert queue.deal(1, ask()) == (0, 16)
    assert queue.deal(0, ask()) == (16, 32)
    assert queue.deal(1, ask(1)) == (32, 48)


def test_ranges_shrink_near_the_end() -> None:
    queue, sizes = ShardQueue(2), []
    while (leased := queue.deal(0, ask(len(sizes), (len(sizes), 0)))) != NOTHING:
        assert leased is not None
        sizes.append(leased[1] - leased[0])
    assert sum(sizes) == 96
    assert sizes == sorted(sizes, reverse=True)
    assert (sizes[0], sizes[-4:]) == (16, [4] * 4)


def test_the_last_batch_may_be_short() -> None:
    queue = ShardQueue(1)
    assert queue.deal(0, ask(whole=[(0, 10)], batches=1)) == (0, 4)
    assert queue.deal(0, ask(1, whole=[(0, 10)])) == (4, 8)
    assert queue.deal(0, ask(2, whole=[(0, 10)])) == (8, 10)


def test_a_repeated_request_returns_the_same_range() -> None:
    queue = ShardQueue(2)
    assert [queue.deal(0, ask(n)) for n in (0, 1, 0, 1, 2, 1)] == [
        *[(0, 16), (16, 32)] * 2,
        (32, 48),
        (16, 32),
    ]
    for number in (5, -1, -4):
        text = rf"range {number} of loader 0, but received 3 so far; .*persistables"
        with pytest.raises(ProtocolError, match=text):
            queue.deal(0, ask(number))


def test_an_iteration_ends_when_all_records_are_done() -> None:
    queue, whole = ShardQueue(2), [(0, 8)]
    assert queue.deal(0, ask(whole=whole)) == (0, 4)
    assert queue.deal(1, ask(whole=whole)) == (4, 8)
    assert queue.deal(0, ask(1, (0, 4), whole=whole)) is None
    assert queue.deal(1, ask(1, (0, 6), whole=whole)) is None
    assert not queue.has_reply(ask())
    assert queue.remaining(0, 1) == [(6, 8)]
    assert queue.deal(1, ask(1, (0, 8), whole=whole)) == NOTHING
    assert queue.has_reply(ask())
    assert queue.deal(0, ask(1, (0, 4), whole=whole)) == NOTHING
    assert queue.remaining(0, 1) == []


def test_progress_never_goes_backward() -> None:
    queue = ShardQueue(1)
    queue.deal(0, ask())
    queue.reach(0, LeaseProgress(0, 1, (0, 8)))
    queue.deal(0, ask(1, (0, 4)))
    assert queue.remaining(0, 1) == [(8, 96)]


def test_leases_of_a_lost_worker_are_leased_again() -> None:
    queue = ShardQueue(2)
    queue.deal(0, ask())
    queue.deal(1, ask())
    queue.deal(0, ask(1, (0, 12)))
    assert queue.release(0) == [(0, [(12, 16), (32, 48)])]
    assert queue.release(0) == []
    assert queue.deal(1, ask(1)) == (12, 16)
    assert queue.deal(1, ask(2)) == (32, 48)


def test_a_worker_that_gives_back_may_repeat_its_requests() -> None:
    """Its next incarnation may have to repeat its last step."""
    queue = ShardQueue(2)
    for number in range(3):
        queue.deal(0, ask(number))
    queue.reach(0, LeaseProgress(0, 1, (1, 20), gives_back=True))
    assert queue.remaining(0, 1) == [(20, 96)]
    assert queue.deal(1, ask()) == (20, 36)
    assert [queue.deal(0, ask(n)) for n in range(3)] == [(0, 16), (16, 20), NOTHING]
    assert queue.remaining(0, 1) == [(20, 96)]


def test_waits_for_lists_the_holders_of_leases() -> None:
    queue, whole = ShardQueue(2), [(0, 4)]
    queue.deal(0, ask(whole=whole))
    assert queue.deal(1, ask(whole=whole)) is None
    assert queue.waits_for(1) == []
    assert queue.deal(1, ask(whole=whole, waits=True)) is None
    assert (queue.waits_for(1), queue.waits_for(0)) == ([0], [])
    queue.reach(0, LeaseProgress(0, 1, (0, 4)))
    assert queue.waits_for(1) == []


def test_iterations_that_no_worker_can_ask_for_are_forgotten() -> None:
    queue, whole = ShardQueue(2), [(0, 4)]
    for turn in (1, 2, 3):
        for worker in (0, 1):
            queue.deal(worker, ask(turn=turn, epoch=turn, back=max(1, turn - 1), whole=whole))
        queue.reach(0, LeaseProgress(0, turn, (0, 4)))
    assert [turn.turn for turn in queue.state().turns] == [2, 3]
    assert queue.deal(0, ask(turn=2, epoch=2, back=2, whole=whole)) == (0, 4)
    # forgotten, therefore over
    assert queue.deal(1, ask(turn=1, epoch=1, whole=whole)) == NOTHING
    queue.reach(1, LeaseProgress(0, 1, (0, 4)))
    assert queue.remaining(0, 1) == []
    assert queue.remaining(0, 4) is None
    # a lost worker will not ask
    queue.release(1)
    queue.deal(0, ask(turn=3, epoch=3, back=3, whole=whole))
    assert [turn.turn for turn in queue.state().turns] == [3]


def test_iterations_of_only_some_workers_are_forgotten() -> None:
    queue, whole = ShardQueue(3), [(0, 8)]
    for turn in range(1, 9):
        facts = {"turn": turn, "epoch": turn, "back": max(1, turn - 1), "whole": whole}
        for worker, start in ((0, 0), (1, 4)):
            assert queue.deal(worker, ask(**facts)) == (start, start + 4)
            queue.reach(worker, LeaseProgress(0, turn, (0, start + 4)))
    assert [turn.turn for turn in queue.state().turns] == [7, 8]
    # a late worker receives the same reply as before
    assert queue.deal(2, ask(epoch=1, whole=whole)) == NOTHING
    assert queue.remaining(0, 1) == []
    # free records stay free, and leases are kept while their holders may ask
    queue = ShardQueue(2)
    for turn in range(1, 9):
        queue.deal(0, ask(turn=turn, epoch=turn, back=max(1, turn - 1), whole=whole))
        queue.reach(0, LeaseProgress(0, turn, (0, 2), gives_back=turn != 3))
    turns = queue.state().turns
    assert [turn.turn for turn in turns if turn.leases] == [3, 7, 8]
    assert queue.deal(1, ask(epoch=1, whole=whole)) == (2, 6)


def test_workers_that_iterate_differently_are_refused() -> None:
    queue = ShardQueue(2)
    queue.deal(0, ask())
    for other, text in (
        (ask(epoch=2), r"with records 0 to 95 of epoch 2, but other workers with .* of epoch 0"),
        (ask(whole=[(0, 4), (8, 12)]), r"records 0 to 3 and 8 to 11 of epoch 0, but"),
        (ask(whole=[]), r"no record of epoch 0, but other workers with records 0 to 95"),
    ):
        with pytest.raises(PlanError, match=text):
            queue.deal(1, other)


@pytest.mark.parametrize("unit", [0, -4])
def test_batches_without_records_are_refused(unit: int) -> None:
    queue = ShardQueue(1)
    with pytest.raises(ProtocolError, match=f"asked for batches of {unit} records"):
        queue.deal(0, ask(unit=unit))
    assert queue.deal(0, ask()) == (0, 16)


def test_each_loader_has_its_own_records() -> None:
    queue = ShardQueue(1)
    assert queue.deal(0, ask()) == (0, 16)
    assert queue.deal(0, ask(loader=1, whole=[(0, 4)])) == (0, 4)
    assert queue.deal(0, ask(1)) == (16, 32)


def test_an_epoch_without_records_is_over() -> None:
    assert ShardQueue(1).deal(0, ask(whole=[])) == NOTHING


def test_intervals_are_joined_and_described() -> None:
    assert joined([(8, 9), (0, 4), (4, 6), (7, 7)]) == [(0, 6), (8, 9)]
    assert described([(0, 6), (8, 9)]) == "0 to 5 and 8 to 8"


class Workers:
    """Workers that lease, train, are lost and ask again; counts how often each record is done."""

    def __init__(self, length: int, workers: int, unit: int, batches: int) -> None:
        self.queue, self.length = ShardQueue(workers), length
        self.facts = {"whole": [(0, length)], "unit": unit, "batches": batches}
        self.done = [0] * length
        #: by worker: the ranges it leased; the one it works on, and the next record
        self.leases: list[list[tuple[int, int]]] = [[] for _ in range(workers)]
        self.position = [(0, 0)] * workers
        self.lost: set[int] = set()
        self.is_over = False

    def lease(self, worker: int, data: Any) -> None:
        leases = self.leases[worker]
        number = data.draw(st.integers(0, len(leases)))
        leased = self.queue.deal(worker, ask(number, self.position[worker], **self.facts))
        if number < len(leases):
            assert leased == leases[number]
        elif leased == NOTHING:
            self.is_over = True
        elif leased is not None:
            leases.append(leased)

    def train(self, worker: int, data: Any) -> None:
        """Train some records of the current range."""
        number, position = self.position[worker]
        if number < len(self.leases[worker]):
            start, stop = self.leases[worker][number]
            first = max(start, position)
            end = data.draw(st.integers(first, stop))
            for record in range(first, end):
                self.done[record] += 1
            self.position[worker] = (number, end) if end < stop else (number + 1, 0)

    def report(self, worker: int, data: Any) -> None:
        self.queue.reach(worker, LeaseProgress(0, 1, self.position[worker]))

    def lose(self, worker: int, data: Any) -> None:
        """Lose a worker after it has reported its progress."""
        if len(self.lost) < len(self.leases) - 1:
            self.report(worker, data)
            self.queue.release(worker)
            self.lost.add(worker)

    def restart(self, worker: int, data: Any) -> None:
        """Restart the server from its saved state."""
        state = msgspec.msgpack.decode(
            msgspec.msgpack.encode(self.queue.state()), type=ShardQueueState
        )
        assert state == self.queue.state()
        self.queue = ShardQueue(len(self.leases))
        self.queue.restore(state)

    def check(self) -> None:
        """No record is leased twice, and each one is leased, free or done."""
        held = [i for hand in self._hands() for i in hand]
        free = [i for turn in self.queue.state().turns for i in turn.free]
        records = [r for start, stop in (*held, *free) for r in range(start, stop)]
        assert len(records) == len(set(records))
        assert max(self.done) <= 1
        assert all(r in records for r, times in enumerate(self.done) if not times) or self.is_over

    def _hands(self) -> list[list[tuple[int, int]]]:
        turns = self.queue._turns.values()
        return [leases.remaining() for turn in turns for leases in turn.leases.values()]

    def finish(self, data: Any) -> None:
        here = [w for w in range(len(self.leases)) if w not in self.lost]
        while not self.is_over:
            for worker in here:
                number = self.position[worker][0]
                if number == len(self.leases[worker]):
                    leased = self.queue.deal(
                        worker, ask(number, self.position[worker], **self.facts)
                    )
                    self.is_over |= leased == NOTHING
                    self.leases[worker] += [leased] if leased not in (None, NOTHING) else []  # type: ignore[list-item]
                else:
                    start, stop = self.leases[worker][number]
                    for record in range(max(start, self.position[worker][1]), stop):
                        self.done[record] += 1
                    self.position[worker] = number + 1, 0


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(st.integers(1, 60), st.integers(1, 3), st.integers(1, 5), st.integers(1, 4), st.data())
def test_each_record_is_done_once(
    length: int, workers: int, unit: int, batches: int, data: Any
) -> None:
    job = Workers(length, workers, unit, batches)
    names = st.sampled_from(["lease", "lease", "train", "train", "report", "lose", "restart"])
    job.lease(0, data)
    for name, worker in data.draw(st.lists(st.tuples(names, st.integers(0, workers - 1)))):
        if worker not in job.lost:
            getattr(job, name)(worker, data)
            job.check()
    job.finish(data)
    assert job.done == [1] * length
