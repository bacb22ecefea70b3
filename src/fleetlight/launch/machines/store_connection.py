# SPDX-License-Identifier: Apache-2.0
"""A connection to the launchers' store whose waits end, and which is replaced when it fails."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any, Protocol, TypeVar, cast

#: the longest time for a reply of the store, unless its machine is unreachable
STORE_DEADLINE_S = 8.0

_T = TypeVar("_T")


class StoreLostError(RuntimeError):
    """The store did not reply."""


class StoreGoneError(StoreLostError):
    """The store has ended and will not restart."""


def bounded(work: Callable[[], _T], deadline_s: float = STORE_DEADLINE_S) -> _T:
    """Call `work`, which may hang, on a thread that is abandoned at the deadline.

    torch's store waits forever for a reply when a cable is cut: the connection stays open then.
    """
    done: queue.SimpleQueue[tuple[_T | None, Exception | None]] = queue.SimpleQueue()

    def run() -> None:
        try:
            done.put((work(), None))
        except Exception as error:  # the caller raises it
            done.put((None, error))

    threading.Thread(target=run, daemon=True).start()
    try:
        value, error = done.get(timeout=deadline_s)
    except queue.Empty:
        raise StoreLostError(f"the store did not reply within {deadline_s:.3g} s") from None
    if error is not None:
        raise error
    return cast("_T", value)


class Retry(Protocol):
    """Repeats failed attempts."""

    def outlast(self, attempt: Callable[[], _T]) -> _T:
        """Retry until success or a deadline."""


class StoreConnection:
    """A connection that is replaced after a failure."""

    def __init__(
        self, raw: Any, renew: Callable[[], Any] | None = None, retry: Retry | None = None
    ) -> None:
        """Without `retry`, the first failure is final."""
        self._raw, self._renew, self._retry = raw, renew, retry

    @property
    def raw(self) -> Any:
        """The current connection."""
        return self._raw

    def call(self, work: Callable[[Any], _T]) -> _T:
        """Call `work` with the connection; a retry may repeat a part that already took effect."""
        if self._retry is None:
            return self._attempt(work)
        return self._retry.outlast(lambda: self._attempt(work))

    def _attempt(self, work: Callable[[Any], _T]) -> _T:
        if self._raw is None and self._renew is not None:
            self._raw = self._renew()
        raw = self._raw
        try:
            return bounded(lambda: work(raw))
        except RuntimeError:
            if self._renew is not None:
                self._raw = None
            raise
