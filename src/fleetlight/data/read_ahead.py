# SPDX-License-Identifier: Apache-2.0
"""`ReadAhead`: an iterator whose next values may be loaded before their turn."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator
from typing import Any, TypeVar

T = TypeVar("T")


class ReadAhead(Iterator[T]):
    """Iterates as `values` does; `peek` loads values early.

    An error belongs to the value after those loaded, and is raised when that is reached.
    """

    def __init__(self, values: Iterator[T]) -> None:
        self._values = values
        self._early: deque[T] = deque()
        #: of the value after those loaded; at the end a StopIteration
        self._error: Exception | None = None

    def peek(self, count: int) -> list[T]:
        """The next values, at most `count`; fewer before the end or before an error."""
        while len(self._early) < count and self._error is None:
            try:
                self._early.append(next(self._values))
            except Exception as error:
                self._error = error
        return list(itertools.islice(self._early, count))

    @property
    def surely_continues(self) -> bool:
        """True if a value is known to follow; nothing is loaded to find that out."""
        if self._early or self._error is not None:
            return bool(self._early)
        # iterators of lists know how many values are left, those of loaders may only guess
        hint: Any = getattr(self._values, "__length_hint__", None)
        return hint is not None and hint() > 0

    def __next__(self) -> T:
        if self._early:
            return self._early.popleft()
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        return next(self._values)
