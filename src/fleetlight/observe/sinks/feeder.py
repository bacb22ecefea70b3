# SPDX-License-Identifier: Apache-2.0
"""`SinkFeeder`: a thread of worker 0 that sends the figures of the job to its sinks."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from fleetlight.observe.figures.history import History, Series
from fleetlight.observe.figures.job_figures import job_figures
from fleetlight.observe.figures.registry import Registry
from fleetlight.observe.log import logger
from fleetlight.observe.sinks.services import FigureSink, finite

#: a sink that fails so often in a row is closed
_MOST_FAILURES = 5


class SinkFeeder:
    """Reads what all processes record, or without a log folder the figures of this one."""

    def __init__(
        self,
        sinks: Sequence[FigureSink],
        registry: Registry,
        log_dir: Path | None,
        every_s: float,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._failures = dict.fromkeys(sinks, 0)
        self._registry, self._every_s, self._clock = registry, every_s, clock
        self._history = None if log_dir is None else History(log_dir)
        self._own = Series()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="fleet-sinks", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Send the last figures, and close the sinks."""
        if self._over.is_set():
            return
        self._over.set()
        self._thread.join()
        self.feed()
        for sink in list(self._failures):
            self._guarded(sink, sink.close)

    def feed(self) -> None:
        """Send the present figures."""
        now = self._clock()
        step, values = job_figures(self._series(), now, self._every_s)
        for sink in list(self._failures):
            self._guarded(sink, functools.partial(sink.write, step, finite(values), now))

    def _series(self) -> Mapping[str, Series]:
        if self._history is not None:
            self._history.poll()
            return self._history.series
        self._own.add(self._registry.snapshot())
        return {"worker.0": self._own}

    def _run(self) -> None:
        while not self._over.wait(self._every_s):
            self.feed()

    def _guarded(self, sink: FigureSink, act: Callable[[], None]) -> None:
        """Training continues without a service that fails."""
        try:
            act()
        except Exception as error:
            self._failures[sink] += 1
            logger.warning("%s does not take figures: %s", type(sink).__name__, error)
            if self._failures[sink] >= _MOST_FAILURES:
                del self._failures[sink]
                logger.error(
                    "%s gets no more figures after %d failures", type(sink).__name__, _MOST_FAILURES
                )
        else:
            self._failures[sink] = 0
