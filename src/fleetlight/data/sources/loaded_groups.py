# SPDX-License-Identifier: Apache-2.0
"""`LoadedGroups`: the groups in memory, and those that threads load before they are needed."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

#: a window is over after so many batches without a record of it
_PATIENCE = 8
#: one that no batch has reached is over after others were so many times, or if so many newer wait
_STALE, _MAX_UNREAD = 3, 16
#: windows that are over are remembered, for a batch that returns to one
_PAST = 16
#: other groups that stay in memory, once one of them was needed again
_OTHERS = 3
#: groups that are remembered after they left the memory
_REMEMBERED = 4


@dataclasses.dataclass
class _OpenWindow:
    """Groups that are read together, from their announcement on."""

    groups: frozenset[int]
    #: how many times windows were over before
    announced_after: int
    #: batches since the last one with a record of it; None before the first one
    unused: int | None = None


class LoadedGroups:
    """Loads each group once while it is needed. A forked process loads its own.

    The groups of a window are needed from its announcement until some batches have no record of it,
    after one that had. It keeps few others, since the kernel clears new memory, which takes longer
    than decoding.
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
        #: in the order of their last use
        self._groups: OrderedDict[int, Future[Any]] = OrderedDict()
        self._open: dict[frozenset[int], _OpenWindow] = {}
        self._past: deque[frozenset[int]] = deque(maxlen=_PAST)
        self._over = 0
        self._released: deque[int] = deque(maxlen=_REMEMBERED)
        self._spare = 0
        self._pool: ThreadPoolExecutor | None = None

    def will_read(self, groups: Sequence[int]) -> None:
        """Begin to load a window."""
        self._forget_in_a_fork()
        window = frozenset(groups)
        # as the newest, even if it is open
        self._open.pop(window, None)
        self._open[window] = _OpenWindow(window, self._over)
        unread = [one.groups for one in self._open.values() if one.unused is None]
        if len(unread) > _MAX_UNREAD:
            # no batches are taken, or only of other records
            del self._open[unread[0]]
            self._release(groups)
        for group in groups:
            self._begin(group)

    def has_announced(self, group: int) -> bool:
        """True for a group of an open window."""
        self._forget_in_a_fork()
        return any(group in window for window in self._open)

    def start_batch(self, groups: Iterable[int]) -> None:
        """Release what is over; `groups` are those of the batch that comes."""
        self._forget_in_a_fork()
        own = set(groups)
        self._reopen(own.difference(*self._open))
        for window in self._open.values():
            if not own.isdisjoint(window.groups):
                window.unused = 0
            elif window.unused is not None:
                window.unused += 1
        over = [window.groups for window in self._open.values() if self._is_over(window)]
        for past in over:
            del self._open[past]
        self._past += over
        self._over += bool(over)
        self._release(own)

    def _is_over(self, window: _OpenWindow) -> bool:
        if window.unused is None:
            return self._over - window.announced_after > _STALE
        return window.unused > _PATIENCE

    def _reopen(self, missing: set[int]) -> None:
        """Open a window again to which a loop returns, after batches of another one."""
        for window in self._past if missing else ():
            if missing <= window:
                self._open[window] = _OpenWindow(window, self._over, 0)
                return

    def get(self, group: int) -> Any:
        """A group; waits until it is loaded."""
        self._forget_in_a_fork()
        if group not in self._groups:
            self._release([group])
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
        if group in self._released:
            self._spare = _OTHERS
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self._threads, thread_name_prefix="fleetlight-data")
        self._groups[group] = self._pool.submit(self._load, group)

    def _release(self, used: Iterable[int]) -> None:
        """Drop groups that no open window has, besides those in use."""
        kept = set(used).union(*self._open)
        others = [one for one in self._groups if one not in kept]
        for one in others[: max(0, len(others) - self._spare)]:
            self._released.append(one)
            loaded = self._groups.pop(one)
            if not loaded.cancel() and self._pool is not None:
                # a thread that loads frees its memory, mostly, and loads the next group into it;
                # at the end of the program no thread takes it any more
                with contextlib.suppress(RuntimeError):
                    self._pool.submit(_drop, loaded)


def _drop(loaded: Future[Any]) -> None:
    """Forget a group."""
