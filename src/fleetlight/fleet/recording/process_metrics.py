# SPDX-License-Identifier: Apache-2.0
"""Metrics of this process: `fleet.process_metrics`, `fleet.log`, and where they are recorded."""

from __future__ import annotations

import atexit
import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from fleetlight.files.atomic import replace_file
from fleetlight.fleet.job import Job, current
from fleetlight.fleet.plan.bound_plan import mode_of
from fleetlight.fleet.recording.tracing import ProcessTracer
from fleetlight.observe.log import logger
from fleetlight.observe.telemetry.recorder import MetricRecorder
from fleetlight.observe.telemetry.registry import registry
from fleetlight.observe.telemetry.snapshot import FOLDER
from fleetlight.observe.telemetry.step_times import BACKWARD, step_times
from fleetlight.roles import Role
from fleetlight.torch_compat.used_graphs import time_backwards

if TYPE_CHECKING:
    from fleetlight.static.program import Program

#: a larger picture is left out: pages read files of a few MiB
_MAX_SVG_LENGTH = 1 << 20


def start_metrics(job: Job) -> None:
    """Count the time of steps in this thread; record metrics where there is a log folder."""
    role = job.role
    step_times.begin()
    time_backwards(functools.partial(step_times.enter, BACKWARD), step_times.leave)
    job.closers.callback(time_backwards, None, step_times.leave)
    job.closers.callback(registry.add(job.metrics))
    log_dir = None if role.log_dir is None else Path(role.log_dir)
    if role.is_worker and not job.group.index and job.strategy.sinks:
        _start_sinks(job, log_dir)
    if log_dir is not None and role.index is not None:
        if role.is_worker and not role.index:
            _describe(job, log_dir)
            job.strategy_changes = functools.partial(_describe, job, log_dir)
            job.program_runs = functools.partial(_draw, job, log_dir)
        tracer = ProcessTracer(job, log_dir)
        recorder = MetricRecorder(
            log_dir, role.kind.value, role.index, registry, each_time=tracer.look
        )
        # leaving the job records its last metrics; a server only ends
        job.closers.callback(recorder.close)
        atexit.register(recorder.close)


def _start_sinks(job: Job, log_dir: Path | None) -> None:
    # imported late, since most jobs have no sinks
    from fleetlight.observe.sinks.feeder import SinkFeeder
    from fleetlight.observe.sinks.services import openers

    strategy = job.strategy
    feeder = SinkFeeder(openers(strategy.sinks), registry, log_dir, strategy.sinks_every_s)
    job.closers.callback(feeder.close)


def _draw(job: Job, log_dir: Path, program: Program) -> None:
    """Add the picture of the program that the job trains."""
    from fleetlight.static.drawing.svg import svg_of

    try:
        svg = svg_of(program.draw().picture)
    except Exception as error:  # a job trains without its picture
        logger.warning("the program is not drawn: %s: %s", type(error).__name__, error)
        return
    if len(svg) <= _MAX_SVG_LENGTH:
        _describe(job, log_dir, svg=svg)


def _describe(job: Job, log_dir: Path, **more: str) -> None:
    """Write down what the job is, for pages about it."""
    mode = mode_of(job.strategy) if job.collective_group is None else "collective"
    facts = {"mode": mode, "explain": job.strategy.explain(), "torch": str(torch.__version__)}
    facts |= more
    try:
        (log_dir / FOLDER).mkdir(exist_ok=True)
        data = msgspec.json.encode(facts)
        replace_file(log_dir / FOLDER / "job.json", data, unique=True, durable=False)
    except OSError as error:
        logger.warning("the job is not described in %s: %s", log_dir, error)


def note(role: Role, kind: str, text: str, step: int | None = None) -> None:
    """Record an event of this process."""
    registry.event(f"{role.kind.value} {role.index}", kind, text, step)


def log(**values: Any) -> None:
    """Log numbers by name, such as `fleet.log(loss=loss, auc=auc)`, on any worker.

    Cheap: a tensor is read about once a second, when metrics are recorded. The page, Prometheus and
    sinks show the mean of the values since then, and over the workers that log the name.

    Args:
        values: numbers, or tensors of one element.

    Raises:
        RoleError: this process is a server.

    Example:
        >>> fleet.init(is_collective=True)
        >>> fleet.log(loss=torch.tensor(0.25), auc=0.75)
    """
    current().refuse_in_server("log")
    registry.logged.add(values)


def process_metrics() -> dict[str, float]:
    """What this process counts now, by name: steps, times, rows, bytes.

    A table's metric has the table in its name, as in `table_rows{users}`. `staleness` is a mean.

    Returns:
        Metrics by name.

    Example:
        >>> fleet.init(is_collective=True)
        >>> "steps" in fleet.process_metrics()
        True
    """
    current()
    snapshot = registry.snapshot(takes=False)
    means = {
        name: sum(number * times for number, times in counts.items()) / sum(counts.values())
        for name, counts in snapshot.counts.items()
        if counts
    }
    return {**snapshot.values, **means}
