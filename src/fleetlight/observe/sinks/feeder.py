# SPDX-License-Identifier: Apache-2.0
"""`SinkFeeder`: a thread of worker 0 that sends the figures of the job to its sinks."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from fleetlight.errors import ConfigError
from fleetlight.observe.figures.history import History, Series
from fleetlight.observe.figures.job_figures import job_figures
from fleetlight.observe.figures.registry import Registry
from fleetlight.observe.log import logger
from fleetlight.observe.sinks.services import FigureSink, finite

#: a sink that fails so often in a row is given up
_MOST_FAILURES = 5
#: how long the end of a job waits for the last figures
_CLOSE_S = 10.0


class _FedSink:
    """A service that gets figures; one that cannot be opened is tried again later."""

    def __init__(self, name: str, opener: Callable[[], FigureSink]) -> None:
        self.name, self._opener = name, opener
        self._sink: FigureSink | None = None
        self._failures = 0

    @property
    def is_given_up(self) -> bool:
        return self._failures >= _MOST_FAILURES

    def open(self) -> None:
        """Open it; a package that is missing is an error of the user."""
        self._guarded(self._opened)

    def write(self, step: int, values: Mapping[str, float], at: float) -> None:
        """Send figures."""
        self._guarded(lambda: self._opened().write(step, values, at))

    def close(self) -> None:
        """Deliver what was written; one that has failed would make the end wait."""
        if self._sink is not None and not self._failures:
            self._guarded(self._sink.close)

    def _opened(self) -> FigureSink:
        if self._sink is None:
            self._sink = self._opener()
        return self._sink

    def _guarded(self, act: Callable[[], object]) -> None:
        """Training continues without a service that fails."""
        if self.is_given_up:
            return
        try:
            act()
        except ConfigError:
            raise
        except Exception as error:
            self._failures += 1
            logger.warning("%s does not take figures: %s", self.name, error)
            if self.is_given_up:
                logger.error("%s gets no more figures after %d failures", self.name, _MOST_FAILURES)
        else:
            self._failures = 0


class SinkFeeder:
    """Reads what all processes record, or without a log folder the figures of this one."""

    def __init__(
        self,
        openers: Mapping[str, Callable[[], FigureSink]],
        registry: Registry,
        log_dir: Path | None,
        every_s: float,
        clock: Callable[[], float] = time.time,
        close_s: float = _CLOSE_S,
    ) -> None:
        """`openers`: what opens each sink, by the name that messages have."""
        self._registry, self._every_s, self._clock = registry, every_s, clock
        self._close_s = close_s
        self._history = None if log_dir is None else History(log_dir)
        self._own = Series()
        self._services = [_FedSink(name, opener) for name, opener in openers.items()]
        for service in self._services:
            # in the thread of the script, whose run of MLflow they may join
            service.open()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="fleet-sinks", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Send the last figures, and close the sinks, unless that takes too long."""
        if self._over.is_set():
            return
        self._over.set()
        self._thread.join(self._close_s)
        if self._thread.is_alive():
            names = ", ".join(one.name for one in self._services if not one.is_given_up)
            logger.warning(
                "the last figures did not reach %s within %g s; the job ends without them",
                names,
                self._close_s,
            )
            return
        for service in self._services:
            # in the thread that has opened it: MLflow keeps runs by thread
            service.close()

    def feed(self) -> None:
        """Send the present figures."""
        now = self._clock()
        step, values = job_figures(self._series(), now, self._every_s)
        for service in self._services:
            service.write(step, finite(values), now)

    def _series(self) -> Mapping[str, Series]:
        if self._history is not None:
            self._history.poll()
            return self._history.series
        self._own.add(self._registry.snapshot())
        return {"worker.0": self._own}

    def _run(self) -> None:
        while not self._over.wait(self._every_s):
            self.feed()
        self.feed()
