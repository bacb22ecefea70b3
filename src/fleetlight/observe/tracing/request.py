# SPDX-License-Identifier: Apache-2.0
"""How `fleetlight trace` asks the processes of a job, by a file in the folder of metrics."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Any

import msgspec

from fleetlight.files.atomic import replace_file
from fleetlight.observe.telemetry.snapshot import FOLDER
from fleetlight.observe.tracing.clocks import ClockLead
from fleetlight.observe.tracing.spans import TraceSpan

_REQUEST = "trace-request.json"


class TraceStage(enum.Enum):
    """Servers record before the first worker does, and until the last has ended."""

    SERVERS_BEGIN = "servers begin"
    WORKERS_BEGIN = "workers begin"
    OVER = "over"


class TraceRequest(msgspec.Struct, frozen=True):
    """A trace that is wanted."""

    id: str
    #: steps of each worker
    steps: int
    stage: TraceStage = TraceStage.SERVERS_BEGIN


class TracePart(msgspec.Struct, frozen=True):
    """The trace of one process."""

    #: `worker 0`
    name: str
    pid: int
    spans: list[TraceSpan]
    #: events of torch's profiler, and the microseconds since 1970 to which their times are relative
    torch_events: list[dict[str, Any]] = []
    torch_base_us: float = 0.0
    #: why something is missing, for the user
    note: str = ""
    #: the clock of its times, and how far those of servers are ahead of it
    host: str = ""
    clocks: dict[str, ClockLead] = {}


def begun(name: str) -> str:
    """The name of an empty part, by which a server says that it records."""
    return f"{name} begun"


def request(log_dir: Path, wanted: TraceRequest) -> None:
    """Ask the processes of the job."""
    folder = log_dir / FOLDER
    folder.mkdir(exist_ok=True)
    replace_file(folder / _REQUEST, msgspec.json.encode(wanted), unique=True, durable=False)


def requested(log_dir: Path) -> TraceRequest | None:
    """The last request; an OSError says that the folder is out of reach now."""
    try:
        return msgspec.json.decode((log_dir / FOLDER / _REQUEST).read_bytes(), type=TraceRequest)
    except (FileNotFoundError, msgspec.MsgspecError):
        return None


def withdraw(log_dir: Path, wanted: TraceRequest) -> None:
    """End a trace: no process records for it from now on, and no part of it stays."""
    if is_wanted(log_dir, wanted):
        (log_dir / FOLDER / _REQUEST).unlink(missing_ok=True)
    remove_parts(log_dir, wanted.id)


def is_wanted(log_dir: Path, wanted: TraceRequest) -> bool:
    """True until the trace is withdrawn, or another one is requested."""
    last = requested(log_dir)
    return last is not None and last.id == wanted.id


def remove_parts(log_dir: Path, number: str = "*") -> None:
    """Remove the parts of a trace, or of all traces, that no command has taken."""
    for path in (log_dir / FOLDER).glob(f"trace-{number}.*.json"):
        path.unlink(missing_ok=True)


def write_part(log_dir: Path, wanted: TraceRequest, part: TracePart) -> None:
    """Write the trace of this process, if the command still wants it."""
    path = _part_file(log_dir, wanted.id, part.name)
    replace_file(path, msgspec.json.encode(part), unique=True, durable=False)
    # asked after the file is there: a command that withdraws first removes no later part
    if not is_wanted(log_dir, wanted):
        path.unlink(missing_ok=True)


def take_part(log_dir: Path, wanted: TraceRequest, name: str) -> TracePart | None:
    """Read the trace of a process, and remove its file; None until it is there."""
    path = _part_file(log_dir, wanted.id, name)
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    path.unlink(missing_ok=True)
    return msgspec.json.decode(data, type=TracePart)


def _part_file(log_dir: Path, number: str, name: str) -> Path:
    return log_dir / FOLDER / f"trace-{number}.{name.replace(' ', '.')}.json"
