# SPDX-License-Identifier: Apache-2.0
"""A process's part in `fleetlight trace`: torch's profiler in workers, spans everywhere."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec
import torch

from fleetlight.fleet.job import Job
from fleetlight.observe.log import logger
from fleetlight.observe.tracing.request import TracePart, TraceRequest, requested, write_part
from fleetlight.observe.tracing.spans import spans

#: a server ends after so long, even if no request says that the workers have
_LONGEST_S = 300.0


class ProcessTracer:
    """Looks for requests in the thread that records figures."""

    def __init__(self, job: Job, log_dir: Path) -> None:
        self._job, self._log_dir = job, log_dir
        self._name = f"{job.role.kind.value} {job.role.index}"
        # a request that was there before this process is not for it
        last = requested(log_dir)
        self._done = "" if last is None else last.id
        self._running: TraceRequest | None = None
        self._until = 0.0

    def look(self) -> None:
        """Begin or end a trace, if that is requested."""
        wanted = requested(self._log_dir)
        if self._running is not None and self._job.role.is_server:
            is_over = wanted is None or wanted.id != self._running.id or wanted.is_over
            if is_over or time.monotonic() > self._until:
                self.finish(self._running, [], 0.0)
        elif wanted is not None and wanted.id != self._done and not wanted.is_over:
            self._done, self._running = wanted.id, wanted
            if self._job.role.is_server:
                self._until = time.monotonic() + _LONGEST_S
                spans.start()
            else:
                self._job.step_made = _StepTrace(self, self._job, wanted).step

    def finish(self, wanted: TraceRequest, events: list[dict[str, Any]], base_us: float) -> None:
        """Write the trace of this process."""
        self._running = None
        index = self._job.role.index
        found = [
            # workers number the requests to each server
            msgspec.structs.replace(span, ends=f"{span.ends}.{index}") if span.ends else span
            for span in spans.stop()
        ]
        part = TracePart(self._name, os.getpid(), found, events, base_us)
        try:
            write_part(self._log_dir, wanted, part)
        except OSError as error:
            logger.warning("the trace of this process cannot be written: %s", error)


class _StepTrace:
    """Records steps from one end of a step to another, in the training thread."""

    def __init__(self, tracer: ProcessTracer, job: Job, wanted: TraceRequest) -> None:
        self._tracer, self._job, self._wanted = tracer, job, wanted
        self._left = wanted.steps
        self._profiler: torch.profiler.profile | None = None

    def step(self) -> None:
        """A step was made."""
        if self._profiler is None:
            self._profiler = torch.profiler.profile()
            self._profiler.start()
            spans.start()
            return
        self._left -= 1
        if self._left <= 0:
            self._job.step_made = None
            self._profiler.stop()
            self._tracer.finish(self._wanted, *_events_of(self._profiler))


def _events_of(profiler: torch.profiler.profile) -> tuple[list[dict[str, Any]], float]:
    """The events of torch, and the microseconds since 1970 to which their times are relative."""
    with tempfile.TemporaryDirectory(prefix="fleet-trace-") as folder:
        path = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(path))
        found = msgspec.json.decode(path.read_bytes())
    return found["traceEvents"], float(found.get("baseTimeNanoseconds", 0)) / 1000
