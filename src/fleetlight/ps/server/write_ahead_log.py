# SPDX-License-Identifier: Apache-2.0
"""`WriteAheadLog`: the server applies and logs changes in one order."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from numpy.typing import NDArray

from fleetlight.ps.changes import Change
from fleetlight.ps.journal.journal import Journal

Array = NDArray[Any]
T = TypeVar("T")


class WriteAheadLog:
    """Without a journal, changes are not logged, and different tables change concurrently."""

    def __init__(self) -> None:
        #: held while a change is applied and logged, so that its holder sees only whole changes
        self.lock = threading.RLock()
        self._journal: Journal[Change] | None = None
        #: True if the log contains changes of values as well
        self.logs_values = False

    def start(self, journal: Journal[Change], *, values: bool) -> None:
        """Log all changes from now on, or all except changes of values."""
        self._journal = journal
        self.logs_values = values

    def apply(self, change: Change, arrays: Sequence[Array], act: Callable[[], T]) -> T:
        """Apply a change by `act`, and log it unless `act` fails; `act` may overwrite `arrays`."""
        if self._journal is None or not self.logs_values:
            return act()
        record = self._journal.framed(change, arrays)
        with self.lock:
            result = act()
            self._journal.put(record)
        return result

    def append(self, change: Change, arrays: Sequence[Array] = ()) -> None:
        """Log an event whose order with changes of values does not matter."""
        if self._journal is not None:
            self._journal.put(self._journal.framed(change, arrays))

    def wait_on_disk(self) -> None:
        """Return once all changes so far are on disk, so that replies may report them."""
        if self._journal is None:
            return
        # a thread may have read values of a change that is applied and not logged yet
        with self.lock if self.logs_values else contextlib.nullcontext():
            last = self._journal.next - 1
        self._journal.commit(last)
