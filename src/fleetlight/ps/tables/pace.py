# SPDX-License-Identifier: Apache-2.0
"""`Pace`: work beside training that takes a share of a core, and rests for as long as that says."""

from __future__ import annotations

import time
from collections.abc import Callable

#: called between two pieces of work
Between = Callable[[], None]

#: what is shorter is not followed by a rest: sleeping is not as exact as that
_LEAST_S = 1e-3
#: a clock that jumps, or a piece that is long for once, holds nobody up for long
_MOST_S = 1.0


class Pace:
    """Of one thread, which calls it between the pieces of its work."""

    def __init__(self, share: Callable[[], float], wait: Callable[[float], object]) -> None:
        """Work that `share` of the time, above 0; `wait` sleeps so many seconds or less."""
        self._share, self._wait = share, wait
        self._began = time.thread_time()

    def __call__(self) -> None:
        """Rest, after what was worked since the last rest."""
        worked_s = time.thread_time() - self._began
        if worked_s < _LEAST_S:
            return
        if (share := self._share()) < 1:
            self._wait(min(_MOST_S, worked_s * (1 / share - 1)))
        self._began = time.thread_time()


def at_once() -> None:
    """Without a rest."""
