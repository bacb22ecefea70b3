# SPDX-License-Identifier: Apache-2.0
"""`StepJournal`: what a client logs about its steps; `NoJournal` logs nothing."""

from __future__ import annotations

import dataclasses
import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Protocol

from fleetlight.ps.worker.replay.commit_log import Committed, Request
from fleetlight.ps.worker.replay.replay_log import ReplayLog
from fleetlight.wire.control_signals import ControlSignal

#: random bits below the milliseconds of a start
_RANDOM_BITS = 20


def start_stamp() -> int:
    """What a process that starts now has as its `started_at`: later starts have greater ones.

    Processes that a launcher forks together may start in the same microsecond. Servers must not
    take them for one process, so each start has random bits below its milliseconds.
    """
    milliseconds = time.time_ns() // 1_000_000
    return milliseconds << _RANDOM_BITS | secrets.randbits(_RANDOM_BITS)


@dataclasses.dataclass(frozen=True)
class StepOrigin:
    """The position of a step: the counters of the communicator, and `Update.resume_point`."""

    phase: int
    steps: int
    before: int
    resume_point: object


class StepJournal(Protocol):
    """Lets a killed worker resume at its last step; `WorkerJournal` or `NoJournal`."""

    #: the results of calls that run once in a job
    replies: ReplayLog

    @property
    def is_stored(self) -> bool:
        """True when a restarted worker resumes at its last step."""

    @property
    def started_at(self) -> int:
        """The `start_stamp` of the worker's first start; it stays the same over restarts."""

    @property
    def incarnation(self) -> int:
        """Number of times that the worker was started."""

    @property
    def last(self) -> Committed | None:
        """The last step that an earlier start logged."""

    def begin(self) -> None:
        """Start to log, once the worker has joined its job."""

    def commit(
        self,
        origin: StepOrigin | None,
        epoch: int,
        sequences: Sequence[int],
        requests: Mapping[int, Sequence[Request]],
        *,
        called: ControlSignal,
        acknowledged: Sequence[int],
    ) -> None:
        """Log a step before its requests are sent."""

    def close(self, *, is_needed: bool, ended: bool = False) -> None:
        """Close the journal; delete it if not needed, except for the mark that it `ended`."""


class NoJournal:
    """The journal of a worker that restarts only together with all processes."""

    is_stored = False
    incarnation = 1
    last = None

    def __init__(self, started_at: int = 0) -> None:
        self.started_at = started_at
        self.replies = ReplayLog()

    def begin(self) -> None:
        """Do nothing."""

    def commit(
        self,
        origin: StepOrigin | None,
        epoch: int,
        sequences: Sequence[int],
        requests: Mapping[int, Sequence[Request]],
        *,
        called: ControlSignal,
        acknowledged: Sequence[int],
    ) -> None:
        """Do nothing."""

    def close(self, *, is_needed: bool, ended: bool = False) -> None:
        """Do nothing."""
