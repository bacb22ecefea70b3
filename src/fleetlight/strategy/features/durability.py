# SPDX-License-Identifier: Apache-2.0
"""What survives a lost process, and how long the others wait for it."""

from __future__ import annotations

from typing import ClassVar

from fleetlight.errors import StrategyError
from fleetlight.strategy.config_dicts import DurabilityConfigsDict
from fleetlight.strategy.feature import Checks, Chosen, Conflict, Conflicts, Feature
from fleetlight.strategy.features.a_sync import NO_SERVERS
from fleetlight.strategy.job import JobFacts
from fleetlight.strategy.settings import Effect, Nested, Settings, nested, setting, settings_class

#: of a deadline: a wait for a process that is away may have begun before
_PATIENT = 2 / 3

_KEPT = {
    "none": "a server that dies takes its values with it",
    "snapshot": "a server that dies goes on from its last snapshot; what came later is lost",
    "log": "a server that dies goes on with all that it has acknowledged",
}


def _durability(strategy: DurabilityFeature, job: JobFacts) -> Effect:
    return (False, NO_SERVERS) if job.is_collective else (True, _KEPT[strategy.durability])


def _lost_worker(strategy: DurabilityFeature, job: JobFacts) -> Effect:
    if job.is_collective:
        return False, NO_SERVERS
    if job.worker_num == 1:
        return False, "there is one worker, and no job without it"
    if strategy.lost_worker == "fail":
        return True, "the job fails with it, or starts again"
    return True, "the others go on; the job fails with worker 0 only"


def _check_away(strategy: DurabilityFeature, job: JobFacts) -> None:
    """Refuse a process that is away for longer than the others wait for it."""
    configs = strategy.durability_configs
    deadline_s = strategy["deadline_s"] if job.deadline_s is None else job.deadline_s
    if strategy.durability == "none" or configs.away_within(deadline_s) < deadline_s:
        return
    raise StrategyError(
        f"strategy.durability_configs: away_s = {configs.away_s:g} is not less than deadline_s = "
        f"{deadline_s:g}; whoever waits for a server or worker that is away gives up after "
        "deadline_s, and the job fails before away_s is over: raise deadline_s or lower away_s"
    )


@settings_class
class DurabilityConfigs(Settings):
    """Where and how servers keep what outlives them."""

    folder: str = setting("durability", "where; each server has a folder of its own in it")
    sync: str = setting(
        "second",
        "when the disk has what was acknowledged: before that, within a second, or some time",
        choices=("commit", "second", "never"),
    )
    snapshot_s: float = setting(300.0, "seconds between two snapshots of all rows", above=0)
    snapshot_mb: float = setting(
        1024.0, "a snapshot is taken sooner where so many MiB were written since", above=0
    )
    away_s: float = setting(120.0, "how long a server or worker may be away", above=0, maximum=1e7)
    resume: bool = setting(False, "go on with what an earlier job has left")

    def away_within(self, deadline_s: float) -> float:
        """`away_s`; where the script has not set it, less if the others give up sooner."""
        return self.away_s if self.is_set("away_s") else min(self.away_s, deadline_s * _PATIENT)


@settings_class
class DurabilityFeature(Feature):
    """What outlives a lost process of a job with parameter servers."""

    CONFLICTS: ClassVar[Conflicts] = (
        Conflict(
            Chosen("durability", ("snapshot",)),
            Chosen("a_sync_configs.staleness"),
            "the steps that a server loses with its life would be waited for; durability = 'log' "
            "loses none",
        ),
    )
    CHECKS: ClassVar[Checks] = (_check_away,)

    durability: str = setting(
        "none",
        "what a parameter server keeps across its death",
        effect=_durability,
        choices=tuple(_KEPT),
    )
    durability_configs: Nested[DurabilityConfigs, DurabilityConfigsDict] = nested(
        DurabilityConfigs, "where and how it is kept"
    )
    lost_worker: str = setting(
        "fail",
        "what a job with servers does without a worker other than 0",
        effect=_lost_worker,
        choices=("fail", "go_on"),
    )


def _deadline(strategy: DeadlineFeature, job: JobFacts) -> Effect:
    what = "bounds every wait for a peer"
    if job.deadline_s is None:
        return True, f"given to fleet.init, it {what}"
    if strategy.is_set("deadline_s") and strategy.deadline_s != job.deadline_s:
        return False, (
            f"it takes effect only when given to fleet.init; in force are {job.deadline_s:g} s, "
            f"from {job.deadline_from}"
        )
    return True, f"{job.deadline_s:g} s are in force, from {job.deadline_from}; it {what}"


@settings_class
class DeadlineFeature(Feature):
    """The deadline of every wait."""

    deadline_s: float = setting(
        300.0, "how long anything may wait for a peer", effect=_deadline, above=0, maximum=1e7
    )
