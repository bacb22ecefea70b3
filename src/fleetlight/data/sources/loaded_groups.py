# SPDX-License-Identifier: Apache-2.0
"""`LoadedGroups`: the groups in memory, and those that threads load before they are needed."""

from __future__ import annotations

import os
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

#: windows that stay in memory: the next one, the one in use, and one whose last records
#: are in the batch that is taken now
_WINDOWS = 3
#: other groups that stay in memory
_OTHERS = 2


class LoadedGroups:
    """Loads each group once while it is needed. A forked process loads its own."""

    def __init__(self, load: Callable[[int], Any], threads: int = 1) -> None:
        self._load, self._threads = load, threads
        self._forget()

    def __getstate__(self) -> dict[str, Any]:
        return {"_load": self._load, "_threads": self._threads}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._forget()

    def _forget(self) -> None:
        self._process = os.getpid()
        self._groups: OrderedDict[int, Future[Any]] = OrderedDict()
        self._announced: deque[Sequence[int]] = deque(maxlen=_WINDOWS)
        self._pool: ThreadPoolExecutor | None = None

    def will_read(self, groups: Sequence[int]) -> None:
        """Begin to load a window."""
        self._forget_in_a_fork()
        if groups not in self._announced:
            self._announced.append(groups)
        for group in groups:
            self._begin(group)

    def has_announced(self, group: int) -> bool:
        """True for a group of the last windows of `will_read`."""
        self._forget_in_a_fork()
        return any(group in window for window in self._announced)

    def get(self, group: int) -> Any:
        """A group; waits until it is loaded."""
        self._forget_in_a_fork()
        if group not in self._groups:
            self._begin(group)
        self._groups.move_to_end(group)
        try:
            return self._groups[group].result()
        except BaseException:
            # the next call tries again
            self._groups.pop(group, None)
            raise

    def _forget_in_a_fork(self) -> None:
        if self._process != os.getpid():
            self._forget()

    def _begin(self, group: int) -> None:
        if group in self._groups:
            return
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self._threads, thread_name_prefix="fleetlight-data")
        self._groups[group] = self._pool.submit(self._load, group)
        kept = {one for window in self._announced for one in window}
        others = [one for one in self._groups if one not in kept and one != group]
        for one in others[: max(0, len(others) - _OTHERS)]:
            self._groups.pop(one).cancel()
