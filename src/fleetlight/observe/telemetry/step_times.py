# SPDX-License-Identifier: Apache-2.0
"""`StepTimes`: how the training thread divides its time among the parts of a step.

Each moment belongs to exactly one part: a pull inside a forward is a pull. So the parts add up to
the whole time.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from threading import get_ident

from fleetlight.observe.telemetry.catalogue import STEP_PARTS, step_metric
from fleetlight.observe.tracing.spans import spans

_OTHER = STEP_PARTS.index("other")


class StepTimes:
    """Seconds by part since `begin`, of the thread that called it."""

    __slots__ = ("_clock", "_part", "_seconds", "_since", "_thread")

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._thread = 0
        self._part = _OTHER
        #: None before the first part
        self._since: float | None = None
        self._seconds = [0.0] * len(STEP_PARTS)

    def begin(self) -> None:
        """Count this thread, from zero and from its next part on."""
        self._thread = get_ident()
        self._part, self._since = _OTHER, None
        self._seconds = [0.0] * len(STEP_PARTS)

    def enter(self, part: int) -> int:
        """Spend the time from now on in a part; returns the part so far, for `leave`.

        Calls of other threads, and calls before `begin`, count nothing.
        """
        return self._switch(part) if get_ident() == self._thread else -1

    def leave(self, before: int) -> None:
        """Return to the part that `enter` returned."""
        if before >= 0:
            self._switch(before)

    def _switch(self, part: int) -> int:
        now, before, since = self._clock(), self._part, self._since
        if since is not None:
            self._seconds[before] += now - since
            if spans.is_on:
                spans.add(STEP_PARTS[before], since, now)
        self._part, self._since = part, now
        return before

    @contextlib.contextmanager
    def part(self, part: int) -> Iterator[None]:
        """Spend the time of the block in a part."""
        before = self.enter(part)
        try:
            yield
        finally:
            self.leave(before)

    def metrics(self) -> dict[str, float]:
        """The seconds by name; the part that runs now counts up to this moment."""
        if not self._thread:
            return {}
        # read from another thread: at worst a moment counts for the part before
        seconds, part, since = list(self._seconds), self._part, self._since
        if since is not None:
            seconds[part] += max(0.0, self._clock() - since)
        return {step_metric(name): seconds[i] for i, name in enumerate(STEP_PARTS)}


DATA, FORWARD, PULL, BACKWARD, WAIT, PUSH, OPTIMIZER = range(_OTHER)

#: the training thread of this process
step_times = StepTimes()
