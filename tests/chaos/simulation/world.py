# SPDX-License-Identifier: Apache-2.0
"""`World`: a simulated clock, and events in an order that a seed decides."""

import heapq
import itertools
import random
from collections import deque
from collections.abc import Callable
from typing import Any

from greenlet import getcurrent
from tests.chaos.simulation.turns import Turns

#: events in the report of a schedule that failed
REPORTED_EVENTS = 40
#: spurious wake-ups of all waiting threads before the schedule is given up
_LOOKS = 3
#: how often the clock passes deadlines
_LEAPS = 20
#: far more events than any schedule has
_EVENTS = 20_000
#: how often other threads run during a write
_WRITE = 0.2
_TURNS = Turns()


class Violation(AssertionError):
    """A promise was broken."""


class Died(BaseException):
    """The process of a thread was killed: none of its code runs any more."""


class Task:
    """A thread of a simulated process."""

    def __init__(self, process: Any, name: str) -> None:
        self.process, self.name = process, name
        self.place = getcurrent()
        self.is_dead = False
        #: it waits with a timeout
        self.looks = False
        self.is_waiting = False
        #: how often it has waited
        self.waits = 0


class World:
    """One schedule."""

    def __init__(self, seed: str) -> None:
        self.seed = seed
        self.chance = random.Random(seed)
        self.now = 0.0
        #: the share of possible interruptions of a thread that happen
        self.nervous = 0.0
        #: how far the clock advances where all threads wait; a longer wait is stuck
        self.patience = 0.0
        #: how long a message or a reaction takes at most
        self.delay_s = 10.0
        #: True where a wait with a timeout ends by the clock
        self.is_timed = False
        self.most_events = _EVENTS
        self.current: Task | None = None
        self.happened: deque[tuple[float, str, Any]] = deque(maxlen=REPORTED_EVENTS)
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._numbers = itertools.count()
        self._tasks: dict[Task, None] = {}
        self._failure: BaseException | None = None
        self._looks = self._leaps = self._acted = 0

    def clock(self) -> float:
        """The simulated time."""
        return self.now

    def tell(self, who: str, what: Any) -> None:
        """Note an event for the report."""
        self.happened.append((self.now, who, what))

    def later(self, act: Callable[..., None], *arguments: Any, within: float | None = None) -> None:
        """Schedule an event, mostly soon, at times late."""
        drawn = self.chance.random()
        most = self.delay_s if within is None else within
        self.at(self.now + most * drawn * drawn * drawn, act, *arguments)

    def at(self, time: float, act: Callable[..., None], *arguments: Any) -> None:
        """Schedule an event at a time."""
        heapq.heappush(self._heap, (time, next(self._numbers), act, arguments))

    def run(self) -> None:
        """Run all events; raises the first violation."""
        _TURNS.drive(self._act)
        if self._failure is not None:
            raise self._failure

    def spawn(self, process: Any, name: str, act: Callable[[], None]) -> None:
        """Run something as a thread of a process; called by an event."""
        task = self.current = Task(process, name)
        self._tasks[task] = None
        try:
            act()
        except Died:
            pass
        finally:
            del self._tasks[task]
            self.current = None

    def moment(self) -> None:
        """A moment at which a thread may be interrupted, and its process may die."""
        task = self.current
        if task is None:
            return
        if task.is_dead:
            raise Died
        task.process.moment()
        if self.nervous and self.chance.random() < self.nervous:
            self._interrupt(task, 3.0)

    def write(self) -> None:
        """A moment within a write, which takes longer; longest where the process dies in it."""
        task = self.current
        assert task is not None
        if task.is_dead:
            raise Died
        dies = task.process.dies_writing()
        if dies or self.chance.random() < _WRITE:
            self._interrupt(task, 10.0 if dies else 3.0)
        if dies:
            task.process.die()
            raise Died

    def _interrupt(self, task: Task, within: float) -> None:
        self.later(self.wake, task, within=within)
        self.wait(looks=False)

    def wait(self, *, looks: bool) -> None:
        """Let the running thread wait until it is woken."""
        task = self.current
        assert task is not None
        if task.is_dead:
            raise Died
        task.looks, task.is_waiting = looks, True
        task.waits += 1
        task.place = getcurrent()
        _TURNS.leave()
        self.current = task
        if task.is_dead:
            raise Died

    def sleep(self, seconds: float) -> None:
        """Let the running thread wait for this time."""
        task = self.current
        assert task is not None
        self.at(self.now + seconds, self.wake, task)
        self.wait(looks=False)

    def wake(self, task: Task) -> None:
        """An event: a thread resumes."""
        if task.is_waiting:
            task.is_waiting = False
            _TURNS.resume(task.place)

    def alarm(self, task: Task, timeout: float) -> None:
        """Let the next wait of a thread end after this time, in a world with timeouts."""
        if self.is_timed:
            self.at(self.now + timeout, self._ring, task, task.waits + 1)

    def _ring(self, task: Task, wait: int) -> None:
        if task.waits == wait:
            self.wake(task)

    def kill(self, process: Any) -> None:
        """All threads of a process end where they are."""
        for task in self._tasks:
            if task.process is process:
                task.is_dead = True
                if task is not self.current:
                    self.at(self.now, self.wake, task)

    def _act(self) -> bool:
        self.current = None
        try:
            if self._heap and self._failure is None:
                self._acted += 1
                self._looks = 0
                if self._acted > self.most_events:
                    raise Violation("it never ends")
                self.now, _, act, arguments = heapq.heappop(self._heap)
                act(*arguments)
                return True
            return self._look_up()
        except BaseException as error:
            self._failure = self._failure or error
            return True

    def _look_up(self) -> bool:
        """No event is left: wake the waiting threads once more, and then release them."""
        waiting = sorted((t for t in self._tasks if t.is_waiting), key=lambda task: task.name)
        if not waiting:
            return False
        self._looks += 1
        if self._looks > _LOOKS and self.patience and self._leaps < _LEAPS:
            self._leaps += 1
            self.now, self._looks = self.now + self.patience, 0
        if self._looks > _LOOKS or self._failure is not None:
            waiting[0].is_dead = True
            self.wake(waiting[0])
            return True
        for task in waiting:
            if task.looks:
                self.wake(task)
        return True
