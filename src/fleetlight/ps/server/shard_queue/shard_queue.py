# SPDX-License-Identifier: Apache-2.0
"""`ShardQueue`: which records of a loader are free, leased or finished. Pure.

A turn is one iteration of a loader by all workers. The queue cuts its records into ranges on
demand. A worker that repeats a request with the same number gets the same range. So the queue
keeps each worker's ranges until none of its incarnations can request them again.

A turn may be cut: it ends once its leases are finished, and its free records are the next turn of
the same epoch.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence

from fleetlight.errors import PlanError, ProtocolError
from fleetlight.ps.changes import LeaseState, RoundState, ShardQueueState
from fleetlight.ps.messages import LeaseProgress, LeaseRequest
from fleetlight.ps.server.shard_queue.admissions import Admissions

#: positions in an epoch's order; the second is exclusive
Interval = tuple[int, int]
#: the reply once all records are finished
NOTHING: Interval = (0, 0)


@dataclasses.dataclass
class _Leases:
    """The ranges of one worker, by number."""

    ranges: list[Interval] = dataclasses.field(default_factory=list)
    #: the range and position up to which the worker has finished all records
    reached: tuple[int, int] = (0, 0)

    def remaining(self) -> list[Interval]:
        """The records that are not known to be finished."""
        number, at = self.reached
        rest = self.ranges[number:]
        if rest:
            rest[0] = max(at, rest[0][0]), rest[0][1]
        return [(start, stop) for start, stop in rest if start < stop]

    def release_all(self) -> list[Interval]:
        """Remove and return the records that are not known to be finished."""
        rest, (number, at) = self.remaining(), self.reached
        for n, (start, stop) in enumerate(self.ranges[number:], number):
            self.ranges[n] = start, min(stop, max(at, start)) if n == number else start
        return rest


@dataclasses.dataclass
class _Iteration:
    epoch: int
    whole: list[Interval]
    free: list[Interval]
    leases: dict[int, _Leases] = dataclasses.field(default_factory=dict)
    #: True if the queue leases out no more of its records
    is_cut: bool = False
    #: of a cut turn that is over: the records that the next turn leases out
    left: list[Interval] = dataclasses.field(default_factory=list)

    def leases_of(self, worker: int) -> _Leases:
        return self.leases.setdefault(worker, _Leases())

    def holders(self) -> list[int]:
        """Workers with unfinished records."""
        return sorted(worker for worker, leases in self.leases.items() if leases.remaining())

    @property
    def is_over(self) -> bool:
        return not self.free and not self.holders()

    @property
    def is_leased(self) -> bool:
        """True once any worker has got a range."""
        return any(leases.ranges for leases in self.leases.values())

    def cut(self, unit: int, batches: int, workers: int) -> Interval:
        """Cut the lowest free records; fewer when few are left, so that workers end together."""
        left = sum(stop - start for start, stop in self.free)
        share = -(-left // (2 * workers * unit))
        start, stop = self.free[0]
        end = min(stop, start + unit * max(1, min(batches, share)))
        self.free[:1] = [(end, stop)] if end < stop else []
        return start, end


class ShardQueue:
    """The records of all loaders of a job that use a shard queue."""

    def __init__(self, worker_num: int, places: int | None = None) -> None:
        """`places`: how many workers the job may have while it runs."""
        self._places = places or worker_num
        self.admissions = Admissions()
        #: True where a worker that waits for records makes no more steps in the turn
        self.cuts_for_waiting = False
        #: by loader and turn
        self._turns: dict[tuple[int, int], _Iteration] = {}
        #: by loader: the last turn
        self._newest: dict[int, int] = {}
        #: by loader and worker: the first turn that an incarnation may still request
        self._first_turns: dict[tuple[int, int], int] = {}
        #: workers that have left or were lost, and places without a worker
        self._gone: set[int] = set(range(worker_num, self._places))
        #: by waiting worker: the turn whose end it waits for
        self._waiting: dict[int, _Iteration] = {}
        #: the number of changes so far
        self.changes = 0

    def deal(self, worker: int, deal: LeaseRequest) -> Interval | None:
        """The range of this number; `NOTHING` if all is finished, None if records may return."""
        if deal.unit < 1:
            raise ProtocolError(f"worker {worker} asked for batches of {deal.unit} records")
        self._waiting.pop(worker, None)
        turn = self._turn(worker, deal)
        self._forget_old_turns(worker, deal)
        if turn is None:
            return NOTHING
        self._reach(turn.leases_of(worker), deal.reached)
        leased = self._lease(turn, worker, deal)
        self._end_cut(deal.loader, deal.turn)
        if leased is None and turn.is_over:
            leased = NOTHING
        if leased is None and deal.waits:
            self._waiting[worker] = turn
        return leased

    def left(self, loader: int, turn: int) -> list[Interval]:
        """The records of a cut turn that the next turn leases out."""
        there = self._turns.get((loader, turn))
        return [] if there is None else there.left

    def may_cut(self, loader: int) -> bool:
        """True if the newest turn has begun, has records to lease out, and was not cut in vain."""
        key = loader, self._newest.get(loader, 0)
        turn = self._turns.get(key)
        if turn is None or not self.admissions.may_cut(key):
            return False
        return turn.is_leased and not turn.is_cut and bool(turn.free)

    def cut(self, loader: int) -> None:
        """Lease out no more of the newest turn: its free records are the next turn."""
        number = self._newest[loader]
        self._turns[loader, number].is_cut = True
        self.changes += 1
        self._end_cut(loader, number)

    def is_unleased(self, loader: int, turn: int) -> bool:
        """True if this turn is the newest one or comes after it, and no worker has a range."""
        newest = self._newest.get(loader, 0)
        there = self._turns.get((loader, turn))
        return turn > newest or (turn == newest and there is not None and not there.is_leased)

    def join(self, worker: int) -> None:
        """A worker takes a place, whose last worker has left; it knows none of its ranges."""
        self._gone.discard(worker)
        for turn in self._turns.values():
            turn.leases.pop(worker, None)
        for key in [key for key in self._first_turns if key[1] == worker]:
            del self._first_turns[key]

    def _end_cut(self, loader: int, number: int) -> None:
        """End a cut turn once no worker has unfinished records of it; the next turn begins."""
        turn = self._turns.get((loader, number))
        if turn is None or not turn.is_cut or not turn.free or turn.holders():
            return
        turn.left, turn.free = turn.free, []
        # a worker that has left its loop early may be in a later turn
        self._newest[loader] = max(number + 1, self._newest[loader])
        self._turns[loader, number + 1] = _Iteration(turn.epoch, list(turn.left), list(turn.left))
        self.changes += 1

    def reach(self, worker: int, progress: LeaseProgress) -> None:
        """Record the worker's progress; if it gives back its records, free them."""
        turn = self._turns.get((progress.loader, progress.turn))
        if turn is None:
            return
        leases = turn.leases_of(worker)
        self._reach(leases, progress.reached)
        if progress.gives_back:
            self._free(turn, leases)
        self._end_cut(progress.loader, progress.turn)

    @property
    def has_begun(self) -> bool:
        """True once a worker has requested a range."""
        return bool(self._newest)

    def release(self, worker: int) -> list[tuple[int, list[Interval]]]:
        """Remove a worker; return its unfinished records by epoch."""
        self._gone.add(worker)
        self._waiting.pop(worker, None)
        self.admissions.forget(worker)
        freed = [
            (turn.epoch, self._free(turn, turn.leases[worker]))
            for turn in self._turns.values()
            if worker in turn.leases
        ]
        for key in list(self._turns):
            self._end_cut(*key)
        return [(epoch, intervals) for epoch, intervals in freed if intervals]

    def remaining(self, loader: int, turn: int) -> list[Interval] | None:
        """Records that are not known to be finished; None before the turn begins."""
        while self.left(loader, turn):
            turn += 1
        there = self._turns.get((loader, turn))
        if there is None:
            return [] if 0 < turn <= self._newest.get(loader, 0) else None
        leases = [i for leases in there.leases.values() for i in leases.remaining()]
        return joined([*there.free, *leases])

    def has_reply(self, deal: LeaseRequest) -> bool:
        """True if a waiting request would get records or the end of the turn."""
        turn = self._turns.get((deal.loader, deal.turn))
        return turn is None or turn.is_over or (bool(turn.free) and not turn.is_cut)

    def waits_for(self, worker: int) -> list[int]:
        """The workers whose unfinished records a waiting worker waits for."""
        turn = self._waiting.get(worker)
        return [] if turn is None else turn.holders()

    def state(self) -> ShardQueueState:
        """The state of the queue, for the log."""
        turns = [
            RoundState(
                loader,
                number,
                turn.epoch,
                turn.whole,
                turn.free,
                _lease_states(turn.leases),
                turn.is_cut,
                turn.left,
            )
            for (loader, number), turn in self._turns.items()
        ]
        backs = [(*key, back) for key, back in self._first_turns.items()]
        return ShardQueueState(
            turns, dict(self._newest), backs, sorted(self._gone), self.admissions.entering
        )

    def restore(self, state: ShardQueueState) -> None:
        """Restore what `state` returned."""
        self._turns = {
            (turn.loader, turn.turn): _Iteration(
                turn.epoch,
                list(turn.whole),
                list(turn.free),
                {
                    leases.worker: _Leases(list(leases.ranges), leases.reached)
                    for leases in turn.leases
                },
                turn.is_cut,
                list(turn.left),
            )
            for turn in state.turns
        }
        self._newest = dict(state.newest)
        self._first_turns = {(loader, worker): back for loader, worker, back in state.backs}
        self._gone = set(state.gone)
        self.admissions.restore(state.entering)
        self._waiting.clear()

    def _turn(self, worker: int, deal: LeaseRequest) -> _Iteration | None:
        """The requested turn, which its first request begins; None if it ended long ago."""
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
                f"worker {worker} begins an iteration of loader {deal.loader} with "
                f"{_range_text(deal.whole)} of epoch {deal.epoch}, but other workers with "
                f"{_range_text(turn.whole)} of epoch {turn.epoch}; with deal='queue' all workers "
                "need the same data, epochs and checkpoints"
            )
        return turn

    def _forget_old_turns(self, worker: int, deal: LeaseRequest) -> None:
        """Forget turns that no worker can request again."""
        self._first_turns[deal.loader, worker] = deal.back
        first = min((self._first_turn(deal.loader, w) for w in range(self._places)), default=0)
        for key in [k for k in self._turns if k[0] == deal.loader and k != (k[0], deal.turn)]:
            turn, leases = self._turns[key], self._turns[key].leases
            for w in [w for w in leases if self._first_turn(key[0], w) > key[1]]:
                if not leases[w].remaining():
                    del leases[w]
            # a worker that took no part in an ended turn gets the same reply without it
            if key[1] < first or (turn.is_over and not leases and not turn.is_cut):
                del self._turns[key]

    def _first_turn(self, loader: int, worker: int) -> float:
        """The first turn that a worker may still request."""
        return math.inf if worker in self._gone else self._first_turns.get((loader, worker), 0)

    def _lease(self, turn: _Iteration, worker: int, deal: LeaseRequest) -> Interval | None:
        leases = turn.leases_of(worker)
        if not 0 <= deal.number <= len(leases.ranges):
            raise ProtocolError(
                f"worker {worker} asked for range {deal.number} of loader {deal.loader}, but "
                f"received {len(leases.ranges)} so far; positions of a loader with deal='queue' "
                "are saved and loaded by fleet.save_persistables and fleet.load_persistables"
            )
        if deal.number < len(leases.ranges):
            start, stop = leases.ranges[deal.number]
            return (start, stop) if start < stop else NOTHING
        if turn.free and deal.waits and self.cuts_for_waiting and not turn.is_cut:
            turn.is_cut = True
            self.changes += 1
        if turn.free and not turn.is_cut:
            active = self._places - len(self._gone)
            leases.ranges.append(turn.cut(deal.unit, deal.batches, max(1, active)))
            self.changes += 1
            return leases.ranges[-1]
        return NOTHING if turn.is_over else None

    def _reach(self, leases: _Leases, reached: tuple[int, int]) -> None:
        if leases.ranges and reached > leases.reached:
            leases.reached = reached
            self.changes += 1

    def _free(self, turn: _Iteration, leases: _Leases) -> list[Interval]:
        freed = joined(leases.release_all())
        if freed:
            turn.free = joined([*turn.free, *freed])
            self.changes += 1
        return freed


def joined(intervals: Iterable[Interval]) -> list[Interval]:
    """Sort intervals and merge adjacent ones."""
    found: list[Interval] = []
    for start, stop in sorted(intervals):
        if found and found[-1][1] == start:
            found[-1] = found[-1][0], stop
        elif start < stop:
            found.append((start, stop))
    return found


def described(intervals: Sequence[Interval]) -> str:
    """Intervals as text, with inclusive ends."""
    return " and ".join(f"{start} to {stop - 1}" for start, stop in intervals)


def _range_text(intervals: Sequence[Interval]) -> str:
    return f"records {described(intervals)}" if intervals else "no record"


def _lease_states(leases: Mapping[int, _Leases]) -> list[LeaseState]:
    return [
        LeaseState(worker, list(h.ranges), h.reached) for worker, h in leases.items() if h.ranges
    ]
