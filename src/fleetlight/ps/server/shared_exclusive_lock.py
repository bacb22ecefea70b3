# SPDX-License-Identifier: Apache-2.0
"""`SharedExclusiveLock`: pushes hold it shared, a snapshot or a load holds it exclusively."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

from fleetlight.errors import DeadlineError


class SharedExclusiveLock:
    """A lock with shared and exclusive holders, and a deadline for each wait."""

    def __init__(self, deadline_s: float) -> None:
        self._deadline_s = deadline_s
        self._changed = threading.Condition()
        self._shared = 0
        self._is_exclusive = False
        self._shared_hold = _SharedHold(self._acquire_shared, self._release_shared)

    def shared(self) -> contextlib.AbstractContextManager[None]:
        """Hold the lock shared; wait while another thread holds or requests it exclusively."""
        return self._shared_hold

    def _acquire_shared(self) -> None:
        with self._changed:
            if self._is_exclusive:
                self._wait(lambda: not self._is_exclusive, "a push", "a snapshot or a load")
            self._shared += 1

    def _release_shared(self) -> None:
        with self._changed:
            self._shared -= 1
            if self._is_exclusive:
                self._changed.notify_all()

    @contextlib.contextmanager
    def exclusive(self) -> Iterator[None]:
        """Hold the lock exclusively: wait for shared holders, and block new ones."""
        with self._changed:
            self._wait(lambda: not self._is_exclusive, "a snapshot or a load", "another one")
            self._is_exclusive = True
        try:
            with self._changed:
                self._wait(
                    lambda: not self._shared, "a snapshot or a load", "the pushes in progress"
                )
            yield
        finally:
            with self._changed:
                self._is_exclusive = False
                self._changed.notify_all()

    def _wait(self, ready: Callable[[], bool], who: str, what: str) -> None:
        if not self._changed.wait_for(ready, self._deadline_s):
            raise DeadlineError(f"{who} waited {self._deadline_s:g} s for {what} on this server")


class _SharedHold:
    """One object for all holders: it has no state of its own."""

    def __init__(self, acquire: Callable[[], None], release: Callable[[], None]) -> None:
        self._acquire, self._release = acquire, release

    def __enter__(self) -> None:
        self._acquire()

    def __exit__(self, *_: object) -> None:
        self._release()
