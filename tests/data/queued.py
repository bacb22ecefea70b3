# SPDX-License-Identifier: Apache-2.0
"""Workers that read loaders with deal="queue", and their shard queue, in one process."""

import dataclasses
import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from tests.data.observing import Observing
from tests.data.simulated import numbers_in, plain

from fleetlight.data import ShardLoader
from fleetlight.data.queue.client import QueueOptions, RangePosition, RangeRequest
from fleetlight.ps.messages import LeaseProgress, LeaseRequest
from fleetlight.ps.server.shard_queue.shard_queue import Interval, ShardQueue


class WaitsError(Exception):
    """Raised if a worker waits for records leased to others."""


@dataclasses.dataclass
class LocalQueueClient:
    """The shard queue of one worker, without a network; counts the steps of that worker."""

    queue: ShardQueue
    worker: int
    steps_done: int = 0
    acknowledged: int = 0
    calls: list[str] = dataclasses.field(default_factory=list)
    #: lets another worker take its turn; returns False if none can
    others: Callable[[], bool] = lambda: False

    def deal(self, request: RangeRequest) -> Interval | None:
        self.calls.append(f"deal {request.number}")
        dealt = self.queue.deal(self.worker, LeaseRequest(loader=0, **vars(request)))
        if dealt is None and request.waits and not self.others():
            raise WaitsError
        return dealt

    def reached(self, turn: int, position: RangePosition, *, gives_back: bool) -> None:
        self.calls.append("give back" if gives_back else "tell")
        self.queue.reach(self.worker, LeaseProgress(0, turn, position, gives_back))

    def remaining(self, turn: int) -> list[Interval] | None:
        return self.queue.remaining(0, turn)

    def steps(self) -> tuple[int, int]:
        return self.steps_done, self.acknowledged

    def settle(self) -> None:
        self.acknowledged = self.steps_done

    def resume(self) -> None:
        self.calls.append("resume")

    def reopen(self) -> None:
        self.calls.append("reopen")


_all = weakref.WeakSet["Worker"]()


class Worker:
    """Reads a loader; each batch counts as a step by default."""

    def __init__(
        self, queue: ShardQueue, index: int, workers: int, make: Any = plain, **more: Any
    ) -> None:
        _all.add(self)
        self.client = LocalQueueClient(queue, index)
        self.read: list[list[int]] = []
        self.shares: list[Any] = []
        self.states: list[dict[str, Any]] = []
        self.upcoming: list[Any] = []
        batches = more.pop("range_batches", 2)
        self.loader = ShardLoader(
            make(),
            worker=index,
            workers=workers,
            seed=0,
            tail="join",
            observer=Observing(self.shares.append, more.pop("announce", None), follow=self),
            queue=QueueOptions(self.client, batches),
            **more,
        )

    def start_iteration(self) -> None:
        """As in `LoaderObserver`."""

    def before_batch(self, position: Any) -> None:
        """As in `LoaderObserver`."""
        self.states.append(dict(position))
        self.upcoming.append(self.loader.source.records_after(position))

    def epoch(self, *, steps: bool = True) -> Iterator[list[int]]:
        """An epoch, batch by batch; a step ends when the next batch is requested."""
        for batch in self.loader:
            self.read.append(numbers_in(batch))
            yield self.read[-1]
            self.client.steps_done += steps
            self.client.acknowledged = self.client.steps_done


def end_all() -> None:
    """Break reference cycles of workers and loaders, so that the garbage collector finds none.

    Otherwise torch waits five seconds per loading process during any later test.
    """
    for worker in list(_all):
        vars(worker).clear()


def run(workers: Sequence[Worker], turns: Iterable[int] = itertools.count(), **more: Any) -> None:
    """Read an epoch in this order; a waiting worker lets others continue."""
    continue_epochs([worker.epoch(**more) for worker in workers], workers, turns)


def continue_epochs(
    iterators: Sequence[Iterator[Any]],
    workers: Sequence[Worker],
    turns: Iterable[int] = itertools.count(),
) -> None:
    """Read the rest of epochs."""
    left, busy = dict(enumerate(iterators)), set()

    def advance(turn: int) -> bool:
        idle = [number for number in left if number not in busy]
        if not idle:
            return False
        number = idle[turn % len(idle)]
        busy.add(number)
        if next(left[number], None) is None:
            del left[number]
        busy.remove(number)
        return True

    for worker in workers:
        worker.client.others = lambda: advance(0)
    for turn in turns:
        if not advance(turn):
            break
    for worker in workers:
        worker.client.others = lambda: False


def workers_of(number: int, make: Any = plain, **more: Any) -> list[Worker]:
    queue = ShardQueue(number)
    return [Worker(queue, index, number, make, **more) for index in range(number)]


def records(*workers: Worker) -> list[int]:
    return sorted(itertools.chain(*(batch for worker in workers for batch in worker.read)))
