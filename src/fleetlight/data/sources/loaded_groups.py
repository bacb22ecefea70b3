# SPDX-License-Identifier: Apache-2.0
"""`LoadedGroups`: the groups in memory, and those that threads load before they are needed."""

from __future__ import annotations

import os
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

#: windows that stay in memory: the next one, the one in use, and one whose last records
#: are in the batch that is taken now
_WINDOWS = 3
#: other groups that stay in memory, once one of them was needed again
_OTHERS = 3
#: groups that are remembered after they left the memory
_REMEMBERED = 4


class LoadedGroups:
    """Loads each group once while it is needed. A forked process loads its own.

    It keeps few, since new memory costs more than decoding: the kernel clears it first.
    """

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
        self._released: deque[int] = deque(maxlen=_REMEMBERED)
        self._spare = 0
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

    def get_for_batch(self, groups: Sequence[int]) -> Iterator[Any]:
        """The groups of a batch, one after another; windows before theirs are over."""
        self._forget_in_a_fork()
        windows = [any(one in window for one in groups) for window in self._announced]
        if True in windows and not windows[0]:
            for _ in range(windows.index(True)):
                self._announced.popleft()
            self._release(groups)
        yield from map(self.get, groups)

    def get(self, group: int) -> Any:
        """A group; waits until it is loaded."""
        self._forget_in_a_fork()
        if group not in self._groups:
            if group in self._released:
                self._spare = _OTHERS
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
        self._release([group])
        self._groups[group] = self._pool.submit(self._load, group)

    def _release(self, used: Sequence[int]) -> None:
        """Drop groups that no window has, besides those in use."""
        kept = {*used, *(one for window in self._announced for one in window)}
        others = [one for one in self._groups if one not in kept]
        for one in others[: max(0, len(others) - self._spare)]:
            self._released.append(one)
            loaded = self._groups.pop(one)
            if not loaded.cancel() and self._pool is not None:
                # its memory is freed by the thread that has it, which loads the next group into it
                self._pool.submit(_drop, loaded)


def _drop(loaded: Future[Any]) -> None:
    """The caller has no reference left."""
