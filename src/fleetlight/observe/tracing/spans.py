# SPDX-License-Identifier: Apache-2.0
"""`SpanRecorder`: what a process did and when, while a trace is recorded."""

from __future__ import annotations

import threading
import time
from typing import Any

import msgspec

#: spans beyond these are dropped
_MAX_SPANS = 200_000


class TraceSpan(msgspec.Struct, frozen=True):
    """Some time of one thread."""

    name: str
    #: the name of the thread
    track: str
    #: microseconds since 1970
    begin_us: float
    duration_us: float
    arguments: dict[str, Any] = {}
    #: what connects spans of two processes: an arrow leads from the one that begins it
    begins: str = ""
    ends: str = ""


class SpanRecorder:
    """Records spans between `start` and `stop`; code asks `is_on` before it measures."""

    def __init__(self) -> None:
        self.is_on = False
        self._lock = threading.Lock()
        self._spans: list[TraceSpan] = []
        self._offset = 0.0

    def start(self) -> None:
        """Record from now on."""
        # processes of one host have one wall clock; `clocks.py` compares those of hosts
        self._offset = time.time() - time.perf_counter()
        with self._lock:
            self._spans = []
        self.is_on = True

    def stop(self) -> list[TraceSpan]:
        """End, and return the spans."""
        self.is_on = False
        with self._lock:
            spans, self._spans = self._spans, []
        return spans

    def add(
        self,
        name: str,
        begin: float,
        end: float,
        arguments: dict[str, Any] | None = None,
        *,
        begins: str = "",
        ends: str = "",
    ) -> None:
        """Add a span of this thread, between two readings of `time.perf_counter`."""
        span = TraceSpan(
            name,
            threading.current_thread().name,
            1e6 * (begin + self._offset),
            1e6 * (end - begin),
            arguments or {},
            begins,
            ends,
        )
        with self._lock:
            if len(self._spans) < _MAX_SPANS:
                self._spans.append(span)

    def mark(self, begins: str) -> None:
        """Let an arrow begin here."""
        now = time.perf_counter()
        self.add("request", now, now + 1e-6, begins=begins)


#: the spans of this process
spans = SpanRecorder()
