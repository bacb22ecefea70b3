# SPDX-License-Identifier: Apache-2.0
"""Threads of which one runs at a time: a thread that waits gives up its turn until it is called.

So threaded code runs in an order that the seed decides.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any


class Turns:
    """Idle threads run the events; few are ever needed."""

    def __init__(self) -> None:
        self._act: Callable[[], bool] = lambda: False
        #: wakes idle threads
        self._idle: list[Any] = []
        self._over = threading.Lock()

    def drive(self, act: Callable[[], bool]) -> None:
        """Call `act` until it returns False, in the thread that has its turn."""
        self._act, self._over = act, threading.Lock()
        self._over.acquire()
        self._pass_on()
        self._over.acquire()

    def leave(self, lock: Any) -> None:
        """Wait until another thread calls `resume` for that lock."""
        self._pass_on()
        lock.acquire()

    def resume(self, lock: Any) -> None:
        """Give the turn to a waiting thread; returns when this one is needed again."""
        mine = self._sleep()
        lock.release()
        mine.acquire()

    def _pass_on(self) -> None:
        if self._idle:
            self._idle.pop().release()
        else:
            threading.Thread(target=self._run, name="simulated", daemon=True).start()

    def _sleep(self) -> Any:
        mine = threading.Lock()
        mine.acquire()
        self._idle.append(mine)
        return mine

    def _run(self) -> None:
        while True:
            if not self._act():
                mine = self._sleep()
                self._over.release()
                mine.acquire()
