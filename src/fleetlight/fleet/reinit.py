# SPDX-License-Identifier: Apache-2.0
"""A second `fleet.init` in a process, as in a notebook, and what `fleet.reset` forgets."""

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
    """The arguments of a call of `fleet.init`; `is_given` is False for a default strategy."""

    def __init__(
        self, role: Role, is_collective: bool, strategy: DistributedStrategy, is_given: bool
    ) -> None:
        self.role, self.is_collective = role, is_collective
        self.is_given = is_given
        #: the object itself; the script may change it later
        self.strategy = strategy
        self._settings = copy.deepcopy(self.strategy)

    def differences(self, now: InitCall) -> list[str]:
        """Each difference from another call, such as `is_collective = True, now False`."""
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


def accept_repeated_call(job: Job, before: InitCall | None, asked: InitCall) -> InitCall:
    """Return the call that counts from now on; ConfigError where the arguments differ."""
    if before is None:
        raise ConfigError(
            "fleet.init failed in an earlier call of this process; call fleet.reset() first"
        )
    different = before.differences(asked)
    if different:
        raise ConfigError(
            "fleet.init was called earlier in this process with other arguments: "
            f"{', '.join(different)}; repeat the first arguments, which changes nothing, or "
            "call fleet.reset() first, which leaves the job and forgets its models and optimizers"
        )
    has_begun = any(managed.frozen for managed in job.models)
    is_other = asked.is_given and asked.strategy is not before.strategy
    if is_other and job.strategy is before.strategy and not has_begun:
        # the script may set fields of this object later
        job.strategy, job.strategy_from = asked.strategy, "fleet.init"
        before = asked
    logger.debug("fleet.init: called again with the same arguments, changes nothing")
    return before


def forget_last_job() -> None:
    """Forget a job that this process has left; its models and optimizers become plain again."""
    job = last_or_none()
    if job is not None:
        _release(job)
    forget_job()
    watch_no_longer()
    # modules that are not loaded have no programs
    programs = sys.modules.get("fleetlight.fleet.training.programs")
    if programs is not None:
        programs.forget()
    definition = sys.modules.get("fleetlight.static.definition")
    if definition is not None:
        definition.reset_default_programs()


def _release(job: Job) -> None:
    for optimizer in job.optimizers:
        optimizer.release()
    job.release_layers()
    for registered in (job.models, job.optimizers, job.compressions, job.loaders):
        registered.clear()
