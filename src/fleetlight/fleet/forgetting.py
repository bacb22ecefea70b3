# SPDX-License-Identifier: Apache-2.0
"""What `fleet.reset` forgets: models, optimizers and programs become torch's own again."""

from __future__ import annotations

import sys

from fleetlight.fleet.job import Job, last_or_none
from fleetlight.strategy.job import forget_job
from fleetlight.torch_compat.used_graphs import watch_no_longer


def forget() -> None:
    """Forget a job that this process has left."""
    job = last_or_none()
    if job is not None:
        _let_go(job)
    forget_job()
    watch_no_longer()
    # no program without these
    programs = sys.modules.get("fleetlight.fleet.training.programs")
    if programs is not None:
        programs.forget()
    definition = sys.modules.get("fleetlight.static.definition")
    if definition is not None:
        definition.reset_default_programs()


def _let_go(job: Job) -> None:
    for optimizer in job.optimizers:
        optimizer.release()
    job.forget()
    for registered in (job.models, job.optimizers, job.compressions, job.loaders):
        registered.clear()
