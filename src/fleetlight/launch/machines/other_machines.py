# SPDX-License-Identifier: Apache-2.0
"""The interface between a session and the other machines, and the case of one machine."""

from __future__ import annotations

import dataclasses
import enum
from typing import Protocol

from fleetlight.launch.job.layout import JobLayout, Node
from fleetlight.launch.processes.failure import JobFailure
from fleetlight.launch.processes.logs import LogFolder
from fleetlight.launch.processes.watch import RemoteState


class NextAction(enum.Enum):
    """What follows after all machines have ended one start of the job."""

    FINISH = enum.auto()
    #: a failure that a restart may cure
    RESTART = enum.auto()
    #: machines joined or left, and the job continues with the connected ones
    REGROUP = enum.auto()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Conclusion:
    """What all machines agree on after one start of the job."""

    next: NextAction
    failure: JobFailure | None = None


class OtherMachines(Protocol):
    """The other machines."""

    def gather(self, node: Node) -> JobLayout:
        """Wait for the other machines; return the layout of the job."""

    def share(self, job_id: str | None) -> str:
        """Publish the job's id on node 0; on the others (`job_id` None) wait for it."""

    def follow(self, folder: LogFolder) -> None:
        """Bring the metrics and logs of other machines to node 0, from now on."""

    def exchange_state(self, workers_done: bool) -> RemoteState:
        """Report this machine's state; return that of the other machines."""

    def conclude(self, failure: JobFailure | None, *, restarts_left: int) -> Conclusion:
        """Report that this machine has ended its processes; wait for the others and agree."""

    def give_up(self, why: str) -> None:
        """Report that this machine cannot continue, so that the others do not wait for it."""

    def close(self) -> None:
        """Disconnect from the other machines."""


class NoOtherMachines:
    """A job of one machine."""

    def gather(self, node: Node) -> JobLayout:
        """The layout of this machine alone."""
        return JobLayout(nodes=(node,))

    def share(self, job_id: str | None) -> str:
        """Return `job_id`."""
        assert job_id is not None
        return job_id

    def follow(self, folder: LogFolder) -> None:
        """Do nothing: all metrics and logs are here."""

    def exchange_state(self, workers_done: bool) -> RemoteState:
        """Return DONE: no other machine has work left."""
        return RemoteState.DONE

    def conclude(self, failure: JobFailure | None, *, restarts_left: int) -> Conclusion:
        """Decide by this machine's failure."""
        return conclusion(failure, restarts_left)

    def give_up(self, why: str) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


def conclusion(failure: JobFailure | None, restarts_left: int) -> Conclusion:
    """The rule that all machines follow."""
    may_restart = failure is not None and failure.may_restart and restarts_left > 0
    return Conclusion(
        next=NextAction.RESTART if may_restart else NextAction.FINISH, failure=failure
    )
