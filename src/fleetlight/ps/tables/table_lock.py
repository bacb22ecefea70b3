# SPDX-License-Identifier: Apache-2.0
"""`TableLock`: training and the pieces of long work share a table."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from types import TracebackType

from fleetlight.errors import DeadlineError

#: how long a shrink, reset or load waits for another one
UPKEEP_S = 600.0


class TableLock:
    """A re-entrant lock; `piece` holds it for one piece of a save, ahead of later calls.

    A thread that releases a plain lock and takes it again is faster than the thread it wakes, so a
    save could wait for many pushes at each piece. Here it waits for those that came before it.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        #: held by a piece while it waits
        self._gate = threading.Lock()
        self._owner: int | None = None
        self._depth = 0
        self.piece = _AheadOfCalls(self)

    def __enter__(self) -> None:
        # an owner that waited for a waiting piece would wait forever
        if self._gate.locked() and self._owner != threading.get_ident():
            with self._gate:
                pass
        self._acquire()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._release()

    def _acquire_first(self) -> None:
        """Acquire the lock before calls that come later."""
        if self._owner == threading.get_ident():
            self._acquire()
            return
        with self._gate:
            self._acquire()

    def _acquire(self) -> None:
        self._lock.acquire()
        self._owner = threading.get_ident()
        self._depth += 1

    def _release(self) -> None:
        self._depth -= 1
        if not self._depth:
            self._owner = None
        self._lock.release()


class _AheadOfCalls:
    """Acquires a `TableLock` for one piece of long work."""

    def __init__(self, lock: TableLock) -> None:
        self._lock = lock

    def __enter__(self) -> None:
        self._lock._acquire_first()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._lock._release()


class UpkeepLock:
    """Lets one thread at a time shrink, reset or load a table."""

    def __init__(self, table: str) -> None:
        self._table, self._lock = table, threading.Lock()

    @contextlib.contextmanager
    def held(self, what: str) -> Iterator[None]:
        """Inside the block, no other thread shrinks, resets or loads the table."""
        if not self._lock.acquire(timeout=UPKEEP_S):
            raise DeadlineError(
                f"table {self._table!r}: a {what} waited {UPKEEP_S} s for another shrink, reset or "
                "load; try again later"
            )
        try:
            yield
        finally:
            self._lock.release()
