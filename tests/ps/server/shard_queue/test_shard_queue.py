# SPDX-License-Identifier: Apache-2.0
"""ShardQueue: every record is trained once, whichever worker dies, leaves or asks again."""

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


def test_ranges_are_whole_batches_from_the_lowest_on() -> None:
    work = ShardQueue(2)
    assert work.deal(1, ask()) == (0, 16)
    assert work.deal(0, ask()) == (16, 32)
    assert work.deal(1, ask(1)) == (32, 48)


def test_ranges_get_smaller_near_the_end() -> None:
    work, sizes = ShardQueue(2), []
    while (dealt := work.deal(0, ask(len(sizes), (len(sizes), 0)))) != NOTHING:
        assert dealt is not None
        sizes.append(dealt[1] - dealt[0])
    assert sum(sizes) == 96
    assert sizes == sorted(sizes, reverse=True)
    assert (sizes[0], sizes[-4:]) == (16, [4] * 4)


def test_the_last_batch_may_be_short() -> None:
    work = ShardQueue(1)
    assert work.deal(0, ask(whole=[(0, 10)], batches=1)) == (0, 4)
    assert work.deal(0, ask(1, whole=[(0, 10)])) == (4, 8)
    assert work.deal(0, ask(2, whole=[(0, 10)])) == (8, 10)


def test_asked_again_under_the_same_number_it_is_the_same() -> None:
    work = ShardQueue(2)
    assert [work.deal(0, ask(n)) for n in (0, 1, 0, 1, 2, 1)] == [
        *[(0, 16), (16, 32)] * 2,
        (32, 48),
        (16, 32),
    ]
    for number in (5, -1, -4):
        text = rf"range {number} of loader 0, but received 3 so far; .*persistables"
        with pytest.raises(ProtocolError, match=text):
            work.deal(0, ask(number))


def test_a_turn_is_over_when_all_is_done() -> None:
    work, whole = ShardQueue(2), [(0, 8)]
    assert work.deal(0, ask(whole=whole)) == (0, 4)
    assert work.deal(1, ask(whole=whole)) == (4, 8)
    assert work.deal(0, ask(1, (0, 4), whole=whole)) is None
    assert work.deal(1, ask(1, (0, 6), whole=whole)) is None
    assert not work.has_reply(ask())
    assert work.remaining(0, 1) == [(6, 8)]
    assert work.deal(1, ask(1, (0, 8), whole=whole)) == NOTHING
    assert work.has_reply(ask())
    assert work.deal(0, ask(1, (0, 4), whole=whole)) == NOTHING
    assert work.remaining(0, 1) == []


def test_what_was_done_does_not_become_undone() -> None:
    work = ShardQueue(1)
    work.deal(0, ask())
    work.reach(0, LeaseProgress(0, 1, (0, 8)))
    work.deal(0, ask(1, (0, 4)))
    assert work.remaining(0, 1) == [(8, 96)]


def test_what_a_lost_worker_has_in_hand_is_dealt_out_again() -> None:
    work = ShardQueue(2)
    work.deal(0, ask())
    work.deal(1, ask())
    work.deal(0, ask(1, (0, 12)))
    assert work.release(0) == [(0, [(12, 16), (32, 48)])]
    assert work.release(0) == []
    assert work.deal(1, ask(1)) == (12, 16)
    assert work.deal(1, ask(2)) == (32, 48)


def test_a_worker_that_gives_back_may_still_ask_for_what_it_had() -> None:
    """Its last step may have to be made again, by another life of it."""
    work = ShardQueue(2)
    for number in range(3):
        work.deal(0, ask(number))
    work.reach(0, LeaseProgress(0, 1, (1, 20), gives_back=True))
    assert work.remaining(0, 1) == [(20, 96)]
    assert work.deal(1, ask()) == (20, 36)
    assert [work.deal(0, ask(n)) for n in range(3)] == [(0, 16), (16, 20), NOTHING]
    assert work.remaining(0, 1) == [(20, 96)]


def test_who_waits_for_whom() -> None:
    work, whole = ShardQueue(2), [(0, 4)]
    work.deal(0, ask(whole=whole))
    assert work.deal(1, ask(whole=whole)) is None
    assert work.waits_for(1) == []
    assert work.deal(1, ask(whole=whole, waits=True)) is None
    assert (work.waits_for(1), work.waits_for(0)) == ([0], [])
    work.reach(0, LeaseProgress(0, 1, (0, 4)))
    assert work.waits_for(1) == []


def test_turns_that_nobody_asks_for_again_are_forgotten() -> None:
    work, whole = ShardQueue(2), [(0, 4)]
    for turn in (1, 2, 3):
        for worker in (0, 1):
            work.deal(worker, ask(turn=turn, epoch=turn, back=max(1, turn - 1), whole=whole))
        work.reach(0, LeaseProgress(0, turn, (0, 4)))
    assert [one.turn for one in work.state().turns] == [2, 3]
    assert work.deal(0, ask(turn=2, epoch=2, back=2, whole=whole)) == (0, 4)
    # long over
    assert work.deal(1, ask(turn=1, epoch=1, whole=whole)) == NOTHING
    work.reach(1, LeaseProgress(0, 1, (0, 4)))
    assert work.remaining(0, 1) == []
    assert work.remaining(0, 4) is None
    # who is gone will not ask
    work.release(1)
    work.deal(0, ask(turn=3, epoch=3, back=3, whole=whole))
    assert [one.turn for one in work.state().turns] == [3]


def test_turns_that_only_some_workers_are_in_are_forgotten() -> None:
    work, whole = ShardQueue(3), [(0, 8)]
    for turn in range(1, 9):
        facts = {"turn": turn, "epoch": turn, "back": max(1, turn - 1), "whole": whole}
        for worker, start in ((0, 0), (1, 4)):
            assert work.deal(worker, ask(**facts)) == (start, start + 4)
            work.reach(worker, LeaseProgress(0, turn, (0, start + 4)))
    assert [one.turn for one in work.state().turns] == [7, 8]
    # one that comes late is told what it was told before
    assert work.deal(2, ask(epoch=1, whole=whole)) == NOTHING
    assert work.remaining(0, 1) == []
    # what is free stays so, and who was dealt it is known as long as they may ask
    work = ShardQueue(2)
    for turn in range(1, 9):
        work.deal(0, ask(turn=turn, epoch=turn, back=max(1, turn - 1), whole=whole))
        work.reach(0, LeaseProgress(0, turn, (0, 2), gives_back=turn != 3))
    turns = work.state().turns
    assert [one.turn for one in turns if one.hands] == [3, 7, 8]
    assert work.deal(1, ask(epoch=1, whole=whole)) == (2, 6)


def test_workers_that_do_not_iterate_alike_are_told() -> None:
    work = ShardQueue(2)
    work.deal(0, ask())
    for other, text in (
        (ask(epoch=2), r"with records 0 to 95 of epoch 2, but other workers with .* of epoch 0"),
        (ask(whole=[(0, 4), (8, 12)]), r"records 0 to 3 and 8 to 11 of epoch 0, but"),
        (ask(whole=[]), r"no record of epoch 0, but other workers with records 0 to 95"),
    ):
        with pytest.raises(PlanError, match=text):
            work.deal(1, other)


@pytest.mark.parametrize("unit", [0, -4])
def test_batches_without_records_are_refused(unit: int) -> None:
    work = ShardQueue(1)
    with pytest.raises(ProtocolError, match=f"asked for batches of {unit} records"):
        work.deal(0, ask(unit=unit))
    assert work.deal(0, ask()) == (0, 16)


def test_loaders_do_not_mix() -> None:
    work = ShardQueue(1)
    assert work.deal(0, ask()) == (0, 16)
    assert work.deal(0, ask(loader=1, whole=[(0, 4)])) == (0, 4)
    assert work.deal(0, ask(1)) == (16, 32)


def test_an_epoch_without_records_is_over() -> None:
    assert ShardQueue(1).deal(0, ask(whole=[])) == NOTHING


def test_intervals_are_joined_and_told() -> None:
    assert joined([(8, 9), (0, 4), (4, 6), (7, 7)]) == [(0, 6), (8, 9)]
    assert described([(0, 6), (8, 9)]) == "0 to 5 and 8 to 8"


class Hands:
    """Workers that ask, train, are lost and ask again; counts how often each record is done."""

    def __init__(self, length: int, workers: int, unit: int, batches: int) -> None:
        self.work, self.length = ShardQueue(workers), length
        self.facts = {"whole": [(0, length)], "unit": unit, "batches": batches}
        self.done = [0] * length
        #: by worker: ranges it was dealt; which it works at, and where
        self.had: list[list[tuple[int, int]]] = [[] for _ in range(workers)]
        self.at = [(0, 0)] * workers
        self.gone: set[int] = set()
        self.is_over = False

    def take(self, worker: int, data: Any) -> None:
        had = self.had[worker]
        number = data.draw(st.integers(0, len(had)))
        dealt = self.work.deal(worker, ask(number, self.at[worker], **self.facts))
        if number < len(had):
            assert dealt == had[number]
        elif dealt == NOTHING:
            self.is_over = True
        elif dealt is not None:
            had.append(dealt)

    def train(self, worker: int, data: Any) -> None:
        """Go on by some records."""
        number, at = self.at[worker]
        if number < len(self.had[worker]):
            start, stop = self.had[worker][number]
            first = max(start, at)
            end = data.draw(st.integers(first, stop))
            for record in range(first, end):
                self.done[record] += 1
            self.at[worker] = (number, end) if end < stop else (number + 1, 0)

    def tell(self, worker: int, data: Any) -> None:
        self.work.reach(worker, LeaseProgress(0, 1, self.at[worker]))

    def lose(self, worker: int, data: Any) -> None:
        """What the server does not know to be done is done again."""
        if len(self.gone) < len(self.had) - 1:
            self.tell(worker, data)
            self.work.release(worker)
            self.gone.add(worker)

    def begin_anew(self, worker: int, data: Any) -> None:
        """The server dies, and comes back with what it has written down."""
        state = msgspec.msgpack.decode(
            msgspec.msgpack.encode(self.work.state()), type=ShardQueueState
        )
        assert state == self.work.state()
        self.work = ShardQueue(len(self.had))
        self.work.restore(state)

    def check(self) -> None:
        """Nobody has what another one has, and what nobody has is free or done."""
        held = [i for hand in self._hands() for i in hand]
        free = [i for turn in self.work.state().turns for i in turn.free]
        records = [r for start, stop in (*held, *free) for r in range(start, stop)]
        assert len(records) == len(set(records))
        assert max(self.done) <= 1
        assert all(r in records for r, times in enumerate(self.done) if not times) or self.is_over

    def _hands(self) -> list[list[tuple[int, int]]]:
        turns = self.work._turns.values()
        return [hand.remaining() for turn in turns for hand in turn.hands.values()]

    def finish(self, data: Any) -> None:
        here = [w for w in range(len(self.had)) if w not in self.gone]
        while not self.is_over:
            for worker in here:
                number = self.at[worker][0]
                if number == len(self.had[worker]):
                    dealt = self.work.deal(worker, ask(number, self.at[worker], **self.facts))
                    self.is_over |= dealt == NOTHING
                    self.had[worker] += [dealt] if dealt not in (None, NOTHING) else []  # type: ignore[list-item]
                else:
                    start, stop = self.had[worker][number]
                    for record in range(max(start, self.at[worker][1]), stop):
                        self.done[record] += 1
                    self.at[worker] = number + 1, 0


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 60), st.integers(1, 3), st.integers(1, 5), st.integers(1, 4), st.data())
def test_each_record_is_done_once(
    length: int, workers: int, unit: int, batches: int, data: Any
) -> None:
    hands = Hands(length, workers, unit, batches)
    names = st.sampled_from(["take", "take", "train", "train", "tell", "lose", "begin_anew"])
    hands.take(0, data)
    for name, worker in data.draw(st.lists(st.tuples(names, st.integers(0, workers - 1)))):
        if worker not in hands.gone:
            getattr(hands, name)(worker, data)
            hands.check()
    hands.finish(data)
    assert hands.done == [1] * length
