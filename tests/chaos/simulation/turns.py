# SPDX-License-Identifier: Apache-2.0
"""Threads of which one runs at a time: a thread that waits gives up its turn until it is called.

So threaded code runs in an order that the seed decides. The threads are greenlets: to change from
one to another takes no call of the operating system.
"""

from collections.abc import Callable

from greenlet import getcurrent, greenlet


class Turns:
    """Idle greenlets run the events; few are ever needed."""

    def __init__(self) -> None:
        self._act: Callable[[], bool] = lambda: False
        self._idle: list[greenlet] = []
        self._driver: greenlet | None = None

    def drive(self, act: Callable[[], bool]) -> None:
        """Call `act` until it returns False, in the greenlet that has its turn."""
        self._act, self._driver = act, getcurrent()
        self.leave()

    def leave(self) -> None:
        """Wait until another greenlet calls `resume` for this one."""
        (self._idle.pop() if self._idle else greenlet(self._run)).switch()

    def resume(self, waiting: greenlet) -> None:
        """Give the turn to a waiting greenlet; returns when this one is needed again."""
        self._idle.append(getcurrent())
        waiting.switch()

    def _run(self) -> None:
        while True:
            if not self._act():
                assert self._driver is not None
                self.resume(self._driver)
