# SPDX-License-Identifier: Apache-2.0
"""`WriteAheadLog`: changes are made one after another, and written down in that order."""

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
    """Without a journal changes are only made, and those of different tables beside each other."""

    def __init__(self) -> None:
        #: held while a change is made and put; whoever holds it sees nothing half done
        self.turn = threading.RLock()
        self._journal: Journal[Change] | None = None
        #: True where changes of values are written down, too
        self.logs_values = False

    def keep(self, journal: Journal[Change], *, values: bool) -> None:
        """Write down what is made from now on: all, or only what is no change of `values`."""
        self._journal = journal
        self.logs_values = values

    def make(self, change: Change, arrays: Sequence[Array], act: Callable[[], T]) -> T:
        """Make a change; one that fails was none. `act` may use the arrays up."""
        if self._journal is None or not self.logs_values:
            return act()
        record = self._journal.framed(change, arrays)
        with self.turn:
            result = act()
            self._journal.put(record)
        return result

    def note(self, change: Change, arrays: Sequence[Array] = ()) -> None:
        """Something that has happened, and may lie before or behind changes."""
        if self._journal is not None:
            self._journal.put(self._journal.framed(change, arrays))

    def settle(self) -> None:
        """Return once all that was made so far is written down: then others may be told."""
        if self._journal is None:
            return
        # values may have been read of a change that is made and not put yet
        with self.turn if self.logs_values else contextlib.nullcontext():
            last = self._journal.next - 1
        self._journal.commit(last)
