# SPDX-License-Identifier: Apache-2.0
"""Locks and conditions of a simulated process: threads wait for them in a world."""

import math
import threading
from collections.abc import Callable
from typing import Any

from tests.chaos.simulation.world import Died, Task, World


class Mutex:
    """A reentrant lock."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._owner: Task | None = None
        self._count = 0
        self._waiting: list[Task] = []

    def __enter__(self) -> bool:
        task = self._world.current
        if self._owner is not task or task is None:
            self._take(task)
        self._count += 1
        return True

    def __exit__(self, *_: object) -> None:
        self._count -= 1
        if not self._count:
            self._owner = None
            if self._waiting:
                self._world.later(self._world.wake, self._waiting.pop(0), within=1.0)

    def released(self, act: Callable[[], Any]) -> None:
        """Release the lock during `act`, however often the thread holds it."""
        task = self._world.current
        assert task is not None
        assert task.is_dead or self._owner is task, "it waits without the lock"
        count, self._count = self._count, 1
        self.__exit__()
        try:
            act()
        finally:
            if not task.is_dead:
                self._wait_for(task)
            self._count = count

    def _wait_for(self, task: Task) -> None:
        while self._owner is not None:
            if task not in self._waiting:
                self._waiting.append(task)
            self._world.wait(looks=False)
        if task in self._waiting:
            # something else woke it: the next release must wake another thread
            self._waiting.remove(task)
        self._owner = task

    def _take(self, task: Task | None) -> None:
        assert task is not None, "only threads of a process take locks"
        if task.is_dead:
            return
        self._world.moment()
        self._wait_for(task)


class Condition:
    """A condition as in `threading`; several may share a lock."""

    def __init__(self, world: World, lock: Mutex | None = None) -> None:
        self._world = world
        self._lock = lock or Mutex(world)
        self._sleeping: list[Task] = []

    def __enter__(self) -> bool:
        return self._lock.__enter__()

    def __exit__(self, *error: object) -> None:
        self._lock.__exit__(*error)

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for a call; with a timeout the wait also ends without one."""
        task = self._world.current
        assert task is not None
        self._sleeping.append(task)
        if timeout is not None:
            self._world.alarm(task, timeout)
        try:
            self._lock.released(lambda: self._world.wait(looks=timeout is not None))
        finally:
            if task in self._sleeping:
                self._sleeping.remove(task)
        return True

    def wait_for(self, ready: Callable[[], Any], timeout: float | None = None) -> bool:
        """Wait until the predicate is true; where timeouts end, at most so long."""
        end = math.inf if timeout is None or not self._world.is_timed else self._world.now + timeout
        while not ready():
            if self._world.now >= end:
                return False
            self.wait(timeout if end == math.inf else end - self._world.now)
        return True

    def notify_all(self) -> None:
        """Wake all waiting threads, soon."""
        sleeping, self._sleeping = self._sleeping, []
        for task in sleeping:
            self._world.later(self._world.wake, task, within=1.0)


class Threading:
    """Stands where modules expect `threading`."""

    Lock, Event = staticmethod(threading.Lock), staticmethod(threading.Event)

    def __init__(self) -> None:
        self.world: World

    def RLock(self) -> Mutex:
        """A lock of this world."""
        return Mutex(self.world)

    def Condition(self, lock: Mutex | None = None) -> Condition:
        """A condition of this world."""
        return Condition(self.world, lock)

    class Thread:
        """A thread that is never started."""

        def __init__(self, **_: object) -> None:
            self.is_started = False

        def start(self) -> None:
            """Do nothing: its action is an event here."""

        def is_alive(self) -> bool:
            """Never."""
            return False


__all__ = ["Condition", "Died", "Mutex", "Threading"]
