# SPDX-License-Identifier: Apache-2.0
"""The connection to the launchers' store: every wait ends, a failed one is replaced."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any, Protocol, TypeVar, cast

#: no answer of the store takes longer, unless its machine is out of reach
STORE_DEADLINE_S = 8.0

_T = TypeVar("_T")


class StoreLostError(RuntimeError):
    """The store did not answer."""


class StoreGoneError(StoreLostError):
    """The launcher that served the store does so no more: it will not come back."""


def bounded(work: Callable[[], _T], deadline_s: float = STORE_DEADLINE_S) -> _T:
    """Do something that may hang, in a thread that is left behind if it does.

    torch's store waits for a reply without end when a cable is cut: nobody closes the connection.
    """
    done: queue.SimpleQueue[tuple[_T | None, Exception | None]] = queue.SimpleQueue()

    def run() -> None:
        try:
            done.put((work(), None))
        except Exception as error:  # raised again below
            done.put((None, error))

    threading.Thread(target=run, daemon=True).start()
    try:
        value, error = done.get(timeout=deadline_s)
    except queue.Empty:
        raise StoreLostError(f"the store did not answer for {deadline_s:.3g} s") from None
    if error is not None:
        raise error
    return cast("_T", value)


class Retry(Protocol):
    """Repeats what has failed."""

    def outlast(self, attempt: Callable[[], _T]) -> _T:
        """Try until it works, or until that has taken too long."""


class StoreConnection:
    """A connection, which is replaced once it has failed."""

    def __init__(
        self, raw: Any, renew: Callable[[], Any] | None = None, retry: Retry | None = None
    ) -> None:
        """Without `retry` the first failure is the last."""
        self._raw, self._renew, self._retry = raw, renew, retry

    @property
    def raw(self) -> Any:
        """The connection as it is now."""
        return self._raw

    def call(self, work: Callable[[Any], _T]) -> _T:
        """Do something with the connection; some of it may be done twice when a cable is cut."""
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
