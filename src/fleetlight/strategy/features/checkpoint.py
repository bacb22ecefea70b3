# SPDX-License-Identifier: Apache-2.0
"""Checkpoints that a job saves by itself."""

from __future__ import annotations

from fleetlight.strategy.config_dicts import CheckpointConfigsDict
from fleetlight.strategy.feature import Feature
from fleetlight.strategy.job import JobFacts
from fleetlight.strategy.settings import Effect, Nested, Settings, nested, setting, settings_class


def _checkpoint(strategy: CheckpointFeature, job: JobFacts) -> Effect:
    if not strategy.checkpoint:
        return True, "the job saves when the script does"
    if job.deadline_s is not None and job.checkpoint != strategy.checkpoint:
        force = f"in force is {job.checkpoint!r}" if job.checkpoint else "the job does not save"
        return False, f"it takes effect only when given to fleet.init; {force}"
    return True, f"the job saves by itself, and when it is stopped, into {strategy.checkpoint}"


def _via(strategy: CheckpointFeature, job: JobFacts) -> Effect:
    if job.is_collective:
        return False, "a collective job has no tables"
    if strategy.checkpoint_configs.via == "worker0":
        return True, "servers send the files of their tables to worker 0"
    return True, "each server writes the files of its tables into the folder"


@settings_class
class CheckpointConfigs(Settings):
    """When a job saves by itself, and what it does with what is there when it starts."""

    every_s: float = setting(300.0, "seconds between two saves; 0: not by the clock", minimum=0)
    every_steps: int = setting(0, "optimizer steps between two saves; 0: not by steps", minimum=0)
    via: str = setting(
        "folder", "how files of tables get there", effect=_via, choices=("folder", "worker0")
    )
    grace_s: float = setting(
        30.0, "how long a stop may take where no launcher watches over it", above=0, maximum=1e7
    )
    resume: bool = setting(False, "go on with what an earlier job has saved")


@settings_class
class CheckpointFeature(Feature):
    """Saving by itself, now and then and when the job is stopped."""

    checkpoint: str = setting(
        "",
        "folder that the job saves into by itself; '': it does not",
        effect=_checkpoint,
        variable="FLEET_CHECKPOINT",
    )
    checkpoint_configs: Nested[CheckpointConfigs, CheckpointConfigsDict] = nested(
        CheckpointConfigs, "when it saves, and whether it goes on from there"
    )
