# SPDX-License-Identifier: Apache-2.0
"""What `fleet.reset` forgets: models, optimizers and programs become torch's own again."""

from __future__ import annotations

import sys

from fleetlight.fleet.context import Context, last_or_none
from fleetlight.strategy.job import forget_job
from fleetlight.torch_compat.used_graphs import watch_no_longer


def forget() -> None:
    """Forget a job that this process has left."""
    context = last_or_none()
    if context is not None:
        _let_go(context)
    forget_job()
    watch_no_longer()
    # no program without these
    programs = sys.modules.get("fleetlight.fleet.collective.programs")
    if programs is not None:
        programs.forget()
    definition = sys.modules.get("fleetlight.static.definition")
    if definition is not None:
        definition.reset_default_programs()


def _let_go(context: Context) -> None:
    for optimizer in context.optimizers:
        optimizer.release()
    context.forget()
    for registered in (context.models, context.optimizers, context.compressions, context.loaders):
        registered.clear()
