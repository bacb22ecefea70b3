# SPDX-License-Identifier: Apache-2.0
"""`SinkFeeder`: a thread of worker 0 that sends the metrics of the job to its sinks."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from fleetlight.observe.log import logger
from fleetlight.observe.sinks.services import MetricSink, finite
from fleetlight.observe.telemetry.history import History, Series
from fleetlight.observe.telemetry.job_metrics import job_metrics
from fleetlight.observe.telemetry.registry import Registry

#: a sink that fails so often in a row is given up
_MAX_FAILURES = 5
#: how long the start of a job waits for its services, and the end for the last metrics
_OPEN_S, _CLOSE_S = 3.0, 10.0


class _FedSink:
    """A service that gets metrics; one that cannot be opened is tried again later."""

    def __init__(self, name: str, opener: Callable[[], MetricSink]) -> None:
        self.name, self._opener = name, opener
        self._sink: MetricSink | None = None
        self._failures = 0
        self._is_closed = False

    @property
    def is_over(self) -> bool:
        """Whether it gets nothing more."""
        return self._is_closed or self.is_given_up

    @property
    def is_given_up(self) -> bool:
        return self._failures >= _MAX_FAILURES

    def open(self) -> None:
        """Open it; if that fails, the next metrics open it."""
        self._guarded(self._opened)

    def write(self, step: int, values: Mapping[str, float], at: float) -> None:
        """Send metrics."""
        self._guarded(lambda: self._opened().write(step, values, at))

    def close(self) -> None:
        """Deliver what was written; one that has failed would make the end wait."""
        if self._sink is not None and not self._failures:
            self._guarded(self._sink.close)
        self._is_closed = True

    def _opened(self) -> MetricSink:
        if self._sink is None:
            self._sink = self._opener()
        return self._sink

    def _guarded(self, act: Callable[[], object]) -> None:
        """Training continues without a service that fails."""
        if self.is_given_up:
            return
        try:
            act()
        except Exception as error:
            self._failures += 1
            if self._failures == 1:
                logger.warning("%s does not take metrics, and is tried again: %s", self.name, error)
            if self.is_given_up:
                logger.error(
                    "%s gets no more metrics after %d failures: %s",
                    self.name,
                    self._failures,
                    error,
                )
        else:
            self._failures = 0


class SinkFeeder:
    """Reads what all processes record, or without a log folder the metrics of this one."""

    def __init__(
        self,
        openers: Mapping[str, Callable[[], MetricSink]],
        registry: Registry,
        log_dir: Path | None,
        every_s: float,
        clock: Callable[[], float] = time.time,
        open_s: float = _OPEN_S,
        close_s: float = _CLOSE_S,
    ) -> None:
        """`openers`: what opens each sink, by the name that messages have.

        They are called in the thread: a service may keep the job waiting for `open_s` only.
        """
        self._registry, self._every_s, self._clock = registry, every_s, clock
        self._close_s = close_s
        self._history = None if log_dir is None else History(log_dir)
        self._own = Series()
        self._services = [_FedSink(name, opener) for name, opener in openers.items()]
        self._have_opened, self._over = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="fleet-sinks", daemon=True)
        self._thread.start()
        self._have_opened.wait(open_s)

    def close(self) -> None:
        """Send the last metrics, and close the sinks, unless that takes too long."""
        if self._over.is_set():
            return
        self._over.set()
        self._thread.join(self._close_s)
        if self._thread.is_alive():
            names = ", ".join(one.name for one in self._services if not one.is_over)
            logger.warning(
                "the last metrics did not reach %s within %g s; the job ends without them",
                names,
                self._close_s,
            )

    def feed(self) -> None:
        """Send the present metrics."""
        now = self._clock()
        step, values = job_metrics(self._series(), now, self._every_s)
        for service in self._services:
            service.write(step, finite(values), now)

    def _series(self) -> Mapping[str, Series]:
        if self._history is not None:
            self._history.poll()
            return self._history.series
        self._own.add(self._registry.snapshot())
        return {"worker.0": self._own}

    def _run(self) -> None:
        # one thread opens, feeds and closes them: MLflow keeps runs by thread
        for service in self._services:
            service.open()
        self._have_opened.set()
        while not self._over.wait(self._every_s):
            self.feed()
        self.feed()
        for service in self._services:
            service.close()
