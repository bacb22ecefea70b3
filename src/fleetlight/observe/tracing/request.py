# SPDX-License-Identifier: Apache-2.0
"""How `fleetlight trace` asks the processes of a job, by a file in the folder of figures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from fleetlight.files.atomic import replace_file
from fleetlight.observe.figures.snapshot import FOLDER
from fleetlight.observe.tracing.spans import TraceSpan

_REQUEST = "trace-request.json"


class TraceRequest(msgspec.Struct, frozen=True):
    """A trace that is wanted."""

    id: str
    #: steps of each worker
    steps: int
    #: True once all workers have made them: servers end, too
    is_over: bool = False


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


def request(log_dir: Path, wanted: TraceRequest) -> None:
    """Ask the processes of the job."""
    folder = log_dir / FOLDER
    folder.mkdir(exist_ok=True)
    replace_file(folder / _REQUEST, msgspec.json.encode(wanted), unique=True, durable=False)


def requested(log_dir: Path) -> TraceRequest | None:
    """The last request."""
    try:
        return msgspec.json.decode((log_dir / FOLDER / _REQUEST).read_bytes(), type=TraceRequest)
    except (OSError, msgspec.MsgspecError):
        # there is none, or a network file system does not reply now
        return None


def write_part(log_dir: Path, wanted: TraceRequest, part: TracePart) -> None:
    """Write the trace of this process."""
    path = _part_file(log_dir, wanted.id, part.name)
    replace_file(path, msgspec.json.encode(part), unique=True, durable=False)


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
