# SPDX-License-Identifier: Apache-2.0
"""Threads of which one runs at a time: what waits leaves its turn, and comes back when it is told.

So code that is written for threads runs in an order that a seed decides, and in no other.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any


class Turns:
    """Events are acted upon by any thread that has nothing else to do; few are ever needed."""

    def __init__(self) -> None:
        self._act: Callable[[], bool] = lambda: False
        #: what wakes threads that have nothing else to do
        self._idle: list[Any] = []
        self._over = threading.Lock()

    def drive(self, act: Callable[[], bool]) -> None:
        """Call `act` until it answers False, by whichever thread has its turn."""
        self._act, self._over = act, threading.Lock()
        self._over.acquire()
        self._pass_on()
        self._over.acquire()

    def leave(self, lock: Any) -> None:
        """Wait, until somebody else says `come_back` for that lock."""
        self._pass_on()
        lock.acquire()

    def come_back(self, lock: Any) -> None:
        """Give the turn to who waits; returns when this thread is needed again."""
        mine = self._lie_down()
        lock.release()
        mine.acquire()

    def _pass_on(self) -> None:
        if self._idle:
            self._idle.pop().release()
        else:
            threading.Thread(target=self._run, name="simulated", daemon=True).start()

    def _lie_down(self) -> Any:
        mine = threading.Lock()
        mine.acquire()
        self._idle.append(mine)
        return mine

    def _run(self) -> None:
        while True:
            if not self._act():
                mine = self._lie_down()
                self._over.release()
                mine.acquire()
