# SPDX-License-Identifier: Apache-2.0
"""A process's part in `fleetlight trace`: torch's profiler in workers, spans everywhere."""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch

from fleetlight.errors import FleetError
from fleetlight.fleet.job import Job
from fleetlight.launch.process_identity import this_system
from fleetlight.observe.log import logger
from fleetlight.observe.tracing.clocks import ClockLead, leads_of
from fleetlight.observe.tracing.request import (
    TracePart,
    TraceRequest,
    TraceStage,
    begun,
    requested,
    write_part,
)
from fleetlight.observe.tracing.spans import spans
from fleetlight.torch_compat.profiling import YieldingProfiler

#: a server ends after so long, even if no request says that the workers have
_MAX_TRACE_S = 300.0
_OWN_PROFILER = "no events of torch, since the script uses torch's profiler itself"


class ProcessTracer:
    """Looks for requests in the thread that records metrics."""

    def __init__(self, job: Job, log_dir: Path) -> None:
        self._job, self._log_dir = job, log_dir
        self._name = f"{job.role.kind.value} {job.role.index}"
        # a request that was there before this process is not for it
        self._done = ""
        with contextlib.suppress(OSError):
            last = requested(log_dir)
            self._done = "" if last is None else last.id
        self._running: TraceRequest | None = None
        self._steps: _StepTrace | None = None
        #: True once the command can know that this server records
        self._is_known = False
        self._until = 0.0

    def look(self) -> None:
        """Begin or end a trace, if that is requested."""
        try:
            wanted = requested(self._log_dir)
        except OSError:  # a shared folder that is out of reach for a moment
            return
        # the thread that trains may end it meanwhile
        running = self._running
        if running is None:
            is_server = self._job.role.is_server
            stage = TraceStage.SERVERS_BEGIN if is_server else TraceStage.WORKERS_BEGIN
            if wanted is not None and wanted.id != self._done and wanted.stage is stage:
                self._begin(wanted)
            return
        is_wanted = wanted is not None and wanted.id == running.id
        is_over = wanted is not None and wanted.stage is TraceStage.OVER
        if self._steps is not None:
            # the thread that trains ends it
            self._steps.is_given_up = is_over or not is_wanted
        elif not is_wanted:
            self.give_up()
        elif is_over or time.monotonic() > self._until:
            self.finish(running)
        elif not self._is_known:
            self._is_known = self._say_begun(running)

    def _begin(self, wanted: TraceRequest) -> None:
        self._done, self._running = wanted.id, wanted
        if self._job.role.is_server:
            self._until = time.monotonic() + _MAX_TRACE_S
            spans.start()
            self._is_known = self._say_begun(wanted)
        else:
            self._steps = _StepTrace(self, self._job, wanted)
            self._job.step_made = self._steps.step

    def give_up(self) -> None:
        """End without a trace, since no command waits for it."""
        spans.stop()
        self._running = None

    def finish(
        self,
        wanted: TraceRequest,
        events: list[dict[str, Any]] | None = None,
        base_us: float = 0.0,
        note: str = "",
        clocks: Mapping[str, ClockLead] | None = None,
    ) -> None:
        """Write the trace of this process."""
        index = self._job.role.index
        found = [
            # workers number the requests to each server
            msgspec.structs.replace(span, ends=f"{span.ends}.{index}") if span.ends else span
            for span in spans.stop()
        ]
        here = this_system()
        part = TracePart(
            self._name,
            os.getpid(),
            found,
            events or [],
            base_us,
            note,
            # containers of one machine share its clock
            host=here.boot or here.hostname,
            clocks=dict(clocks or {}),
        )
        self._write(wanted, part)
        self._running = None

    def _say_begun(self, wanted: TraceRequest) -> bool:
        return self._write(wanted, TracePart(begun(self._name), os.getpid(), []))

    def _write(self, wanted: TraceRequest, part: TracePart) -> bool:
        try:
            write_part(self._log_dir, wanted, part)
        except Exception as error:  # the process works without its trace
            logger.warning(
                "the trace of %s is not written to %s: %s", self._name, self._log_dir, _text(error)
            )
            return False
        return True


class _StepTrace:
    """Records steps from one end of a step to another, in the training thread."""

    def __init__(self, tracer: ProcessTracer, job: Job, wanted: TraceRequest) -> None:
        self._tracer, self._job, self._wanted = tracer, job, wanted
        self._left = wanted.steps
        self._profiler: YieldingProfiler | None = None
        #: why there are no events of torch
        self._note = ""
        self._clocks: Mapping[str, ClockLead] = {}
        #: True once no command waits for the trace
        self.is_given_up = False

    def step(self) -> None:
        """A step was made."""
        if self.is_given_up:
            self._give_up()
        elif self._profiler is None:
            self._clocks = self._compared()
            self._profiler = YieldingProfiler()
            self._start(self._profiler)
            spans.start()
        elif self._left > 1:
            self._left -= 1
        else:
            self._job.step_made = None
            found = self._events(self._profiler)
            self._tracer.finish(self._wanted, *found, self._note, self._clocks)

    def _compared(self) -> Mapping[str, ClockLead]:
        try:
            return leads_of(self._job.server_clocks)
        except FleetError:  # the next request of this step says it
            return {}

    def _give_up(self) -> None:
        self._job.step_made = None
        try:
            if self._profiler is not None:
                self._profiler.stop()
        except Exception as error:  # the script trains on
            logger.warning("torch's profiler, which a trace has started: %s", _text(error))
        self._tracer.give_up()

    def _start(self, profiler: YieldingProfiler) -> None:
        try:
            if not profiler.start():
                self._note = _OWN_PROFILER
        except Exception as error:  # the script trains without it
            self._warn(error)

    def _events(self, profiler: YieldingProfiler) -> tuple[list[dict[str, Any]], float]:
        try:
            recorded = profiler.stop()
            if recorded is not None:
                return _events_of(recorded)
            self._note = self._note or _OWN_PROFILER
        except Exception as error:  # a full disk, or a trace that is not JSON
            self._warn(error)
        return [], 0.0

    def _warn(self, error: Exception) -> None:
        self._note = f"no events of torch, since its profiler failed: {_text(error)}"
        logger.warning("the trace of this process has %s", self._note)


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _events_of(profiler: torch.profiler.profile) -> tuple[list[dict[str, Any]], float]:
    """The events of torch, and the microseconds since 1970 to which their times are relative."""
    with tempfile.TemporaryDirectory(prefix="fleet-trace-") as folder:
        path = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(path))
        found = msgspec.json.decode(path.read_bytes())
    return found["traceEvents"], float(found.get("baseTimeNanoseconds", 0)) / 1000
