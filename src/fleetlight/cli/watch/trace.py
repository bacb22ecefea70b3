# SPDX-License-Identifier: Apache-2.0
"""`fleetlight trace`: some steps of all processes of a running job, as one file for Perfetto."""

from __future__ import annotations

import argparse
import secrets
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from fleetlight.errors import DeadlineError, LaunchError, counted
from fleetlight.files.atomic import replace_file
from fleetlight.launch.processes.record import read_records
from fleetlight.observe.tracing.clocks import leads_over_first
from fleetlight.observe.tracing.merged import merged
from fleetlight.observe.tracing.request import (
    TracePart,
    TraceRequest,
    TraceStage,
    begun,
    is_wanted,
    remove_parts,
    request,
    take_part,
    withdraw,
)

_POLL_S = 0.1


def add_trace(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    trace = commands.add_parser(
        "trace",
        help="record some steps of a running job for Perfetto",
        description="Lets every worker record its next steps with torch's profiler, and every "
        "server what it handles meanwhile. Open the file at ui.perfetto.dev, or in "
        "chrome://tracing. On several machines, the log folder must be shared.",
    )
    trace.add_argument("job", metavar="LOGDIR", help="the log folder of the job")
    trace.add_argument("--steps", type=int, default=20, help="steps of each worker (default: 20)")
    trace.add_argument("--output", default="trace.json", metavar="FILE", help="default: trace.json")
    trace.add_argument(
        "--deadline_s", type=float, default=120.0, help="the longest wait (default: 120)"
    )
    trace.set_defaults(command=_trace)


def _trace(found: argparse.Namespace) -> int:
    log_dir = Path(found.job)
    workers, servers = _running(log_dir)
    if found.steps < 1:
        raise LaunchError(f"--steps {found.steps}: expected 1 or more")
    wanted = TraceRequest(secrets.token_hex(4), found.steps)
    until = time.monotonic() + found.deadline_s
    # parts of a command that was killed
    remove_parts(log_dir)
    request(log_dir, wanted)
    try:
        # the first step is not requested from a server that does not record yet
        _parts(log_dir, wanted, [begun(name) for name in servers], until)
        _advance(log_dir, wanted, TraceStage.WORKERS_BEGIN)
        parts = _parts(log_dir, wanted, workers, until)
        _advance(log_dir, wanted, TraceStage.OVER)
        parts += _parts(log_dir, wanted, servers, until)
    finally:
        withdraw(log_dir, wanted)
    replace_file(Path(found.output), msgspec.json.encode(merged(parts)), durable=False)
    print(
        f"{found.output}: {counted(found.steps, 'step')} of {counted(len(workers), 'worker')}, and "
        f"{counted(len(servers), 'server')}; open it at https://ui.perfetto.dev"
    )
    for line in (*_on_clocks(parts), *(f"{one.name}: {one.note}" for one in parts if one.note)):
        print(line)
    return 0


def _advance(log_dir: Path, wanted: TraceRequest, stage: TraceStage) -> None:
    if is_wanted(log_dir, wanted):
        request(log_dir, msgspec.structs.replace(wanted, stage=stage))


def _on_clocks(parts: Sequence[TracePart]) -> Iterator[str]:
    """A line for each other host: how far its clock is off, and whether that is corrected."""
    leads, first = leads_over_first(parts), parts[0]
    for host in dict.fromkeys(part.host for part in parts if part.host != first.host):
        names = ", ".join(part.name for part in parts if part.host == host)
        if (lead := leads.get(host)) is None:
            yield (
                f"{names}: the times are those of another host's clock, uncorrected, since no "
                f"server was asked from both that host and the host of {first.name}"
            )
            continue
        by, error = lead.ahead_us / 1000, lead.error_us / 1000
        yield (
            f"{names}: the clock there is {abs(by):.2f} ms {'ahead of' if by >= 0 else 'behind'} "
            f"that of {first.name} (within {error:.2f} ms), which the trace corrects"
        )


def _running(log_dir: Path) -> tuple[list[str], list[str]]:
    """The names of the workers and servers that run."""
    names = sorted(
        entry.name
        for record, _ in read_records(log_dir)
        if not record.ended
        for entry in record.processes
        if entry.status is None
    )
    workers = [name for name in names if name.startswith("worker ")]
    if not workers:
        raise LaunchError(
            f"{log_dir}: no worker of a job with this log folder runs; start a job with fleetrun, "
            "and give its --log_dir"
        )
    return workers, [name for name in names if name.startswith("server ")]


def _parts(log_dir: Path, wanted: TraceRequest, names: list[str], until: float) -> list[TracePart]:
    """Wait for the traces of these processes."""
    parts: dict[str, TracePart] = {}
    while len(parts) < len(names):
        for name in names:
            part = None if name in parts else take_part(log_dir, wanted, name)
            if part is not None:
                parts[name] = part
        if time.monotonic() > until:
            missing = ", ".join(name.removesuffix(begun("")) for name in names if name not in parts)
            raise DeadlineError(
                f"no trace of {missing} arrived in time: servers begin within about a second, "
                f"and workers record their next {wanted.steps} steps; look whether they make "
                "steps (fleetlight logs), or wait longer with --deadline_s"
            )
        if not is_wanted(log_dir, wanted):
            raise LaunchError(
                f"another fleetlight trace of {log_dir} has begun, which ends this one; wait "
                "until that one ends, and repeat the command"
            )
        time.sleep(_POLL_S)
    return [parts[name] for name in names]
