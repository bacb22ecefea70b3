# SPDX-License-Identifier: Apache-2.0
"""`fleet.init` called again in a process, as in a notebook, and what `fleet.reset` forgets."""

from __future__ import annotations

import copy
import dataclasses
import sys

from fleetlight.errors import ConfigError
from fleetlight.fleet.job import Job, last_or_none
from fleetlight.observe.log import logger
from fleetlight.roles import Role
from fleetlight.strategy import DistributedStrategy, differences
from fleetlight.strategy.job import forget_job
from fleetlight.torch_compat.used_graphs import watch_no_longer


class InitCall:
    """What a call of `fleet.init` has asked for; the strategy may be one that nobody gave."""

    def __init__(self, role: Role, is_collective: bool, given: DistributedStrategy | None) -> None:
        self.role, self.is_collective = role, is_collective
        self.is_given = given is not None
        #: the object itself, which the script may change later
        self.strategy = given or DistributedStrategy()
        self._settings = copy.deepcopy(self.strategy)

    def differences(self, now: InitCall) -> list[str]:
        """`is_collective = True, now False` for all that another call asks otherwise."""
        found: list[str] = []
        if self.is_collective != now.is_collective:
            found.append(f"is_collective = {self.is_collective}, now {now.is_collective}")
        for field in dataclasses.fields(self.role):
            was, then = getattr(self.role, field.name), getattr(now.role, field.name)
            if was != then:
                found.append(f"role.{field.name} = {was!r}, now {then!r}")
        if now.strategy is not self.strategy:
            found += differences(self._settings, now._settings, "strategy.")
        return found


def take_again(job: Job, before: InitCall | None, asked: InitCall) -> InitCall:
    """Go on as before where all is the same; raise where the call asks for something else."""
    if before is None:
        raise ConfigError(
            "fleet.init was called before in this process, and failed; call fleet.reset() first"
        )
    different = before.differences(asked)
    if different:
        raise ConfigError(
            "fleet.init was called before in this process with other arguments: "
            f"{', '.join(different)}; call it with the same ones, which changes nothing, or "
            "fleet.reset() first, which leaves the job and forgets its models and optimizers"
        )
    has_begun = any(plan.frozen for plan in job.models)
    is_other = asked.is_given and asked.strategy is not before.strategy
    if is_other and job.strategy is before.strategy and not has_begun:
        # what the script sets later, it sets in this object
        job.strategy, job.strategy_from = asked.strategy, "fleet.init"
        before = asked
    logger.debug("fleet.init: called again with the same arguments; nothing is changed")
    return before


def forget() -> None:
    """Forget a job that this process has left: models and optimizers become torch's own again."""
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
