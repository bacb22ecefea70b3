# SPDX-License-Identifier: Apache-2.0
"""`Gate`: many pass at a time, or one is alone; so that a cut lies between two pushes."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

from fleetlight.errors import DeadlineError


class Gate:
    """Who changes several tables passes the gate; who needs all of them at rest is alone."""

    def __init__(self, deadline_s: float) -> None:
        self._deadline_s = deadline_s
        self._changed = threading.Condition()
        self._passing = 0
        self._alone = False

    @contextlib.contextmanager
    def passing(self) -> Iterator[None]:
        """Beside others; waits while somebody is, or wants to be, alone."""
        with self._changed:
            self._wait(lambda: not self._alone, "a push", "a cut or a load")
            self._passing += 1
        try:
            yield
        finally:
            with self._changed:
                self._passing -= 1
                self._changed.notify_all()

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Without anybody else: waits for those who are passing, and holds up the next."""
        with self._changed:
            self._wait(lambda: not self._alone, "a cut or a load", "another one")
            self._alone = True
        try:
            with self._changed:
                self._wait(lambda: not self._passing, "a cut or a load", "the pushes under way")
            yield
        finally:
            with self._changed:
                self._alone = False
                self._changed.notify_all()

    def _wait(self, ready: Callable[[], bool], who: str, what: str) -> None:
        if not self._changed.wait_for(ready, self._deadline_s):
            raise DeadlineError(f"{who} waited {self._deadline_s:g} s for {what} on this server")
