# SPDX-License-Identifier: Apache-2.0
"""`ShardQueue`: which records of a loader are free, leased or done. Pure.

A turn is one iteration of a loader by all workers. Its records are cut into ranges on demand. A
worker that repeats a request under the same number gets the same range; so each worker's ranges are
kept, by number, until none of its incarnations can ask for them again.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence

from fleetlight.errors import PlanError, ProtocolError
from fleetlight.ps.changes import LeaseState, RoundState, ShardQueueState
from fleetlight.ps.messages import LeaseProgress, LeaseRequest

#: positions in an epoch's order: from the first up to, and without, the second
Interval = tuple[int, int]
#: the answer where all is done
NOTHING: Interval = (0, 0)


@dataclasses.dataclass
class _Leases:
    """What one worker was dealt, by number."""

    dealt: list[Interval] = dataclasses.field(default_factory=list)
    #: which of these, and up to which position, is done with all before it
    reached: tuple[int, int] = (0, 0)

    def remaining(self) -> list[Interval]:
        """What is not known to be done."""
        number, at = self.reached
        rest = self.dealt[number:]
        if rest:
            rest[0] = max(at, rest[0][0]), rest[0][1]
        return [(start, stop) for start, stop in rest if start < stop]

    def put_down(self) -> list[Interval]:
        """The same; it is this worker's no more."""
        rest, (number, at) = self.remaining(), self.reached
        for n, (start, stop) in enumerate(self.dealt[number:], number):
            self.dealt[n] = start, min(stop, max(at, start)) if n == number else start
        return rest


@dataclasses.dataclass
class _Iteration:
    epoch: int
    whole: list[Interval]
    free: list[Interval]
    hands: dict[int, _Leases] = dataclasses.field(default_factory=dict)

    def hand(self, worker: int) -> _Leases:
        return self.hands.setdefault(worker, _Leases())

    def holders(self) -> list[int]:
        """Who has something in hand."""
        return sorted(worker for worker, hand in self.hands.items() if hand.remaining())

    @property
    def is_over(self) -> bool:
        return not self.free and not self.holders()

    def cut(self, unit: int, batches: int, workers: int) -> Interval:
        """The lowest free records; fewer when few are left, so that workers end together."""
        left = sum(stop - start for start, stop in self.free)
        share = -(-left // (2 * workers * unit))
        start, stop = self.free[0]
        end = min(stop, start + unit * max(1, min(batches, share)))
        self.free[:1] = [(end, stop)] if end < stop else []
        return start, end


class ShardQueue:
    """All loaders of a job that are dealt out range by range."""

    def __init__(self, worker_num: int) -> None:
        self._worker_num = worker_num
        #: by loader and turn
        self._turns: dict[tuple[int, int], _Iteration] = {}
        #: by loader: its last turn
        self._newest: dict[int, int] = {}
        #: by loader and worker: the first turn that any life of it may still ask for
        self._backs: dict[tuple[int, int], int] = {}
        #: those who do no more
        self._gone: set[int] = set()
        #: who waits for the end of which turn
        self._waiting: dict[int, _Iteration] = {}
        #: how often anything has changed
        self.changes = 0

    def deal(self, worker: int, deal: LeaseRequest) -> Interval | None:
        """The range of that number; `NOTHING`: all is done, None: others may give some back."""
        if deal.unit < 1:
            raise ProtocolError(f"worker {worker} asked for batches of {deal.unit} records")
        self._waiting.pop(worker, None)
        turn = self._turn(worker, deal)
        self._look_back(worker, deal)
        if turn is None:
            return NOTHING
        self._reach(turn.hand(worker), deal.reached)
        told = self._dealt(turn, worker, deal)
        if told is None and deal.waits:
            self._waiting[worker] = turn
        return told

    def reach(self, worker: int, told: LeaseProgress) -> None:
        """The worker has done so much; where it gives back, it does no more of this turn."""
        turn = self._turns.get((told.loader, told.turn))
        if turn is None:
            return
        hand = turn.hand(worker)
        self._reach(hand, told.reached)
        if told.gives_back:
            self._free(turn, hand)

    def release(self, worker: int) -> list[tuple[int, list[Interval]]]:
        """The worker does no more at all; answers, by epoch, what it had in hand."""
        self._gone.add(worker)
        self._waiting.pop(worker, None)
        freed = [
            (turn.epoch, self._free(turn, turn.hands[worker]))
            for turn in self._turns.values()
            if worker in turn.hands
        ]
        return [(epoch, intervals) for epoch, intervals in freed if intervals]

    def remaining(self, loader: int, turn: int) -> list[Interval] | None:
        """Records that are not known to be done; None: no worker has begun the turn."""
        there = self._turns.get((loader, turn))
        if there is None:
            return [] if 0 < turn <= self._newest.get(loader, 0) else None
        hands = [i for hand in there.hands.values() for i in hand.remaining()]
        return joined([*there.free, *hands])

    def has_news(self, deal: LeaseRequest) -> bool:
        """True when whoever waited for this would be told something."""
        turn = self._turns.get((deal.loader, deal.turn))
        return turn is None or bool(turn.free) or turn.is_over

    def waits_for(self, worker: int) -> list[int]:
        """Those whose records keep a worker waiting that has none."""
        turn = self._waiting.get(worker)
        return [] if turn is None else turn.holders()

    def state(self) -> ShardQueueState:
        """All of it, to be kept."""
        turns = [
            RoundState(loader, number, turn.epoch, turn.whole, turn.free, _hands(turn.hands))
            for (loader, number), turn in self._turns.items()
        ]
        backs = [(*key, back) for key, back in self._backs.items()]
        return ShardQueueState(turns, dict(self._newest), backs, sorted(self._gone))

    def restore(self, state: ShardQueueState) -> None:
        """The way back of `state`."""
        self._turns = {
            (one.loader, one.turn): _Iteration(
                one.epoch,
                list(one.whole),
                list(one.free),
                {hand.worker: _Leases(list(hand.dealt), hand.reached) for hand in one.hands},
            )
            for one in state.turns
        }
        self._newest = dict(state.newest)
        self._backs = {(loader, worker): back for loader, worker, back in state.backs}
        self._gone = set(state.gone)
        self._waiting.clear()

    def _turn(self, worker: int, deal: LeaseRequest) -> _Iteration | None:
        """The turn asked for, begun by whoever comes first; None: it is long over."""
        key = deal.loader, deal.turn
        turn = self._turns.get(key)
        if turn is None:
            if deal.turn <= self._newest.get(deal.loader, 0):
                return None
            self._newest[deal.loader] = deal.turn
            turn = self._turns[key] = _Iteration(deal.epoch, list(deal.whole), joined(deal.whole))
            self.changes += 1
        if (turn.epoch, turn.whole) != (deal.epoch, list(deal.whole)):
            raise PlanError(
                f"worker {worker} begins iteration {deal.turn} of loader {deal.loader} with "
                f"{_told(deal.whole)} of epoch {deal.epoch}, but other workers with "
                f"{_told(turn.whole)} of epoch {turn.epoch}; with deal='queue' all workers need "
                "the same data, epochs and checkpoints"
            )
        return turn

    def _look_back(self, worker: int, deal: LeaseRequest) -> None:
        """Forget turns that no worker can ask for again."""
        self._backs[deal.loader, worker] = deal.back
        first = min((self._back(deal.loader, w) for w in range(self._worker_num)), default=0)
        for key in [k for k in self._turns if k[0] == deal.loader and k != (k[0], deal.turn)]:
            turn, hands = self._turns[key], self._turns[key].hands
            for w in [w for w in hands if self._back(key[0], w) > key[1]]:
                if not hands[w].remaining():
                    del hands[w]
            # of one that is over a worker that was not in it, and may never be, is told the same
            if key[1] < first or (turn.is_over and not hands):
                del self._turns[key]

    def _back(self, loader: int, worker: int) -> float:
        """The first turn that a worker may still ask for."""
        return math.inf if worker in self._gone else self._backs.get((loader, worker), 0)

    def _dealt(self, turn: _Iteration, worker: int, deal: LeaseRequest) -> Interval | None:
        hand = turn.hand(worker)
        if not 0 <= deal.number <= len(hand.dealt):
            raise ProtocolError(
                f"worker {worker} asked for range {deal.number} of loader {deal.loader}, but "
                f"received {len(hand.dealt)} so far; positions of a loader with deal='queue' are saved and "
                "loaded by fleet.save_persistables and fleet.load_persistables"
            )
        if deal.number < len(hand.dealt):
            start, stop = hand.dealt[deal.number]
            return (start, stop) if start < stop else NOTHING
        if turn.free:
            hand.dealt.append(turn.cut(deal.unit, deal.batches, self._worker_num))
            self.changes += 1
            return hand.dealt[-1]
        return NOTHING if turn.is_over else None

    def _reach(self, hand: _Leases, reached: tuple[int, int]) -> None:
        if hand.dealt and reached > hand.reached:
            hand.reached = reached
            self.changes += 1

    def _free(self, turn: _Iteration, hand: _Leases) -> list[Interval]:
        freed = joined(hand.put_down())
        if freed:
            turn.free = joined([*turn.free, *freed])
            self.changes += 1
        return freed


def joined(intervals: Iterable[Interval]) -> list[Interval]:
    """In order, and as few as can be."""
    found: list[Interval] = []
    for start, stop in sorted(intervals):
        if found and found[-1][1] == start:
            found[-1] = found[-1][0], stop
        elif start < stop:
            found.append((start, stop))
    return found


def told(intervals: Sequence[Interval]) -> str:
    """In words, with the last record in place of the one behind it."""
    return " and ".join(f"{start} to {stop - 1}" for start, stop in intervals)


def _told(intervals: Sequence[Interval]) -> str:
    return f"records {told(intervals)}" if intervals else "no record"


def _hands(hands: Mapping[int, _Leases]) -> list[LeaseState]:
    return [LeaseState(worker, list(h.dealt), h.reached) for worker, h in hands.items() if h.dealt]
