# SPDX-License-Identifier: Apache-2.0
"""What a launcher says to the launchers of the other machines, and the case of no others."""

from __future__ import annotations

import dataclasses
import enum
from typing import Protocol

from fleetlight.launch.job.layout import JobLayout, Node
from fleetlight.launch.processes.failure import JobFailure
from fleetlight.launch.processes.watch import RemoteState


class NextAction(enum.Enum):
    """What happens after all machines have ended one start of the job."""

    FINISH = enum.auto()
    #: a failure that a restart may cure
    RESTART = enum.auto()
    #: machines came or went and the job goes on with those that are there
    REGROUP = enum.auto()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Conclusion:
    """What all machines together made of one start of the job."""

    next: NextAction
    failure: JobFailure | None = None


class OtherMachines(Protocol):
    """The other machines."""

    def gather(self, node: Node) -> JobLayout:
        """Meet the others; who is where."""

    def share(self, job_id: str | None) -> str:
        """The job's id: given by node 0 once its logs are in place, awaited by the others."""

    def elsewhere(self, workers_done: bool) -> RemoteState:
        """Tell the others how it goes here, hear how it goes there."""

    def conclude(self, failure: JobFailure | None, *, restarts_left: int) -> Conclusion:
        """This machine has ended its processes; wait for the others and agree."""

    def give_up(self, why: str) -> None:
        """This machine cannot go on; the others need not wait for its signs of life."""

    def close(self) -> None:
        """Nothing more will be said."""


class NoOtherMachines:
    """A job of one machine."""

    def gather(self, node: Node) -> JobLayout:
        """There is nobody to wait for."""
        return JobLayout(nodes=(node,))

    def share(self, job_id: str | None) -> str:
        """The own id."""
        assert job_id is not None
        return job_id

    def elsewhere(self, workers_done: bool) -> RemoteState:
        """Nobody else has anything left to do."""
        return RemoteState.DONE

    def conclude(self, failure: JobFailure | None, *, restarts_left: int) -> Conclusion:
        """What happened here is what happened."""
        return conclusion(failure, restarts_left)

    def give_up(self, why: str) -> None:
        """There is nobody to tell."""

    def close(self) -> None:
        """Nothing to close."""


def conclusion(failure: JobFailure | None, restarts_left: int) -> Conclusion:
    """The rule all machines follow."""
    may_restart = failure is not None and failure.may_restart and restarts_left > 0
    return Conclusion(
        next=NextAction.RESTART if may_restart else NextAction.FINISH, failure=failure
    )
