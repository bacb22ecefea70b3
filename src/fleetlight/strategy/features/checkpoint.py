# SPDX-License-Identifier: Apache-2.0
"""Automatic checkpoints."""

from __future__ import annotations

from fleetlight.store import is_url
from fleetlight.strategy.config_dicts import CheckpointConfigsDict
from fleetlight.strategy.feature import Feature
from fleetlight.strategy.job import JobFacts
from fleetlight.strategy.settings import Effect, Nested, Settings, nested, setting, settings_class


def _checkpoint(strategy: CheckpointFeature, job: JobFacts) -> Effect:
    if not strategy.checkpoint:
        return True, "only the script saves"
    if job.deadline_s is not None and job.checkpoint != strategy.checkpoint:
        force = f"in force is {job.checkpoint!r}" if job.checkpoint else "the job does not save"
        return False, f"it takes effect only when given to fleet.init; {force}"
    return True, f"the job saves periodically, and when it is stopped, into {strategy.checkpoint}"


def _via(strategy: CheckpointFeature, job: JobFacts) -> Effect:
    if job.is_collective:
        return False, "a collective job has no tables"
    if strategy.checkpoint_configs.via == "worker0":
        return True, "servers send the files of their tables to worker 0"
    return True, "each server writes the files of its tables into the folder"


def _keep(strategy: CheckpointFeature, job: JobFacts) -> Effect:
    if strategy.checkpoint and not is_url(strategy.checkpoint):
        return False, "a folder has one generation; file:///path/to/folder has several"
    return True, f"the last {strategy.checkpoint_configs.keep} saves stay under the URL"


def _base_every(strategy: CheckpointFeature, job: JobFacts) -> Effect:
    every = strategy.checkpoint_configs.base_every
    if job.is_collective:
        return False, "a collective job has no tables"
    if every == 1:
        return True, "each save has all rows of tables"
    return True, f"{every - 1} of {every} saves have only the rows that changed"


@settings_class
class CheckpointConfigs(Settings):
    """When a job saves automatically, and whether it resumes an earlier job.

    Example:
        >>> strategy = fleet.DistributedStrategy(checkpoint="checkpoints")
        >>> strategy.checkpoint_configs = {"every_s": 60.0, "base_every": 10}
    """

    every_s: float = setting(300.0, "seconds between two saves; 0: not by the clock", minimum=0)
    every_steps: int = setting(0, "optimizer steps between two saves; 0: not by steps", minimum=0)
    via: str = setting(
        "folder", "how files of tables get there", effect=_via, choices=("folder", "worker0")
    )
    grace_s: float = setting(
        30.0, "how long a stop may take where no launcher watches over it", above=0, maximum=1e7
    )
    keep: int = setting(
        2, "generations that stay under a URL, the current one included", minimum=1, effect=_keep
    )
    base_every: int = setting(
        1,
        "every Nth save has all rows of tables, the others what changed since; 1: all rows always",
        minimum=1,
        effect=_base_every,
    )
    resume: bool = setting(False, "resume from an earlier job's checkpoint")


@settings_class
class CheckpointFeature(Feature):
    """Automatic checkpoints, periodically and when the job is stopped."""

    checkpoint: str = setting(
        "",
        "folder or URL for automatic checkpoints; '': none",
        effect=_checkpoint,
        variable="FLEET_CHECKPOINT",
    )
    checkpoint_configs: Nested[CheckpointConfigs, CheckpointConfigsDict] = nested(
        CheckpointConfigs, "when it saves, and whether it resumes"
    )
