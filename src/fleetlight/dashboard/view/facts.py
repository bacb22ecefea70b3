# SPDX-License-Identifier: Apache-2.0
"""What the view passes on as data: the job and its processes, and their newest metrics."""

from __future__ import annotations

import dataclasses
import enum
import signal
from collections.abc import Mapping
from typing import Any


class ProcessState(enum.Enum):
    """What the launcher's record says of a process."""

    RUNNING = "running"
    #: exit code 0, or ended with the job
    ENDED = "ended"
    FAILED = "failed"
    #: no launcher of this folder started it
    UNKNOWN = "unknown"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProcessFacts:
    """One process of the job."""

    #: `worker 1`
    name: str
    host: str = ""
    pid: int = 0
    state: ProcessState = ProcessState.UNKNOWN
    #: `killed by SIGKILL`
    detail: str = ""
    restarts: int = 0
    #: when its launcher started it, if an event says so
    started: float | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class LogFolderFacts:
    """The job as its log folder describes it, without metrics."""

    job: str = ""
    folder: str = ""
    #: by name
    processes: Mapping[str, ProcessFacts] = dataclasses.field(default_factory=dict)
    is_over: bool = False
    #: the exit code of fleetrun
    code: int | None = None
    #: free memory of a host, where this machine can see it
    free_bytes: Mapping[str, int] = dataclasses.field(default_factory=dict)
    #: what worker 0 says of the job: the text of explain(), the picture of its program
    description: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProcessReading:
    """The newest metrics of one process, for exporters."""

    kind: str
    index: int
    is_up: bool
    restarts: int
    #: by name, or `name{label}`
    values: Mapping[str, float]
    counts: Mapping[str, Mapping[int, int]]

    @property
    def role(self) -> tuple[str, str]:
        """The labels of the process."""
        return self.kind, str(self.index)


def how_ended(status: int) -> str:
    """How a process ended, by its exit code, or -N for signal N."""
    if status >= 0:
        return f"exit code {status}"
    try:
        return f"killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"killed by signal {-status}"
