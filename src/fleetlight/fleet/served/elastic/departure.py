# SPDX-License-Identifier: Apache-2.0
"""`WorkerDeparture`: a worker of an elastic job leaves at SIGTERM, between two batches."""

from __future__ import annotations

from fleetlight.fleet.checkpoints.autosave import SigtermHandler
from fleetlight.fleet.exit.exit_status import report_saves_at_sigterm
from fleetlight.fleet.job import Job
from fleetlight.observe.log import logger


class WorkerLeaves(SystemExit):
    """This worker leaves the job, and the others continue without it."""

    def __init__(self) -> None:
        super().__init__(0)


class WorkerDeparture(SigtermHandler):
    """Leaves at the first place between two batches after the signal.

    The end of the process returns the records that it has not trained on to the queue, waits for
    the pushes that are in flight, and says goodbye.
    """

    def __init__(self, job: Job) -> None:
        super().__init__()
        self._job = job
        report_saves_at_sigterm(job.role)

    def leave_if_asked(self) -> None:
        """Leave if SIGTERM has arrived; called between two batches."""
        if self.seen:
            logger.warning(
                "SIGTERM: leaving at step %d; the other workers continue", self._job.step
            )
            raise WorkerLeaves
