# SPDX-License-Identifier: Apache-2.0
"""`SharedExclusiveLock`: pushes share it, a cut or a load has it alone."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

from fleetlight.errors import DeadlineError


class SharedExclusiveLock:
    """Pushes hold it shared; a cut or a load of all tables holds it alone."""

    def __init__(self, deadline_s: float) -> None:
        self._deadline_s = deadline_s
        self._changed = threading.Condition()
        self._passing = 0
        self._alone = False

    @contextlib.contextmanager
    def passing(self) -> Iterator[None]:
        """Hold the lock shared; waits while another thread has or wants it alone."""
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
        """Hold the lock alone: waits for shared holders, and makes later ones wait."""
        with self._changed:
            self._wait(lambda: not self._alone, "a cut or a load", "another one")
            self._alone = True
        try:
            with self._changed:
                self._wait(lambda: not self._passing, "a cut or a load", "the pushes in progress")
            yield
        finally:
            with self._changed:
                self._alone = False
                self._changed.notify_all()

    def _wait(self, ready: Callable[[], bool], who: str, what: str) -> None:
        if not self._changed.wait_for(ready, self._deadline_s):
            raise DeadlineError(f"{who} waited {self._deadline_s:g} s for {what} on this server")
