# SPDX-License-Identifier: Apache-2.0
"""`Backend`: whatever can run a `JobSpec` to its end."""

from __future__ import annotations

from typing import Protocol

from fleetlight.launch.job.spec import JobSpec
from fleetlight.launch.screen import Screen


class Backend(Protocol):
    """Runs jobs. A job carries counts, resources and the command, so a cluster's own engine can."""

    def run(self, job: JobSpec, screen: Screen) -> int:
        """Run the job to its end; the exit code."""


def default() -> Backend:
    """Processes on this machine."""
    from fleetlight.launch.session import LocalProcesses

    return LocalProcesses()
