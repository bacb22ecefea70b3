# SPDX-License-Identifier: Apache-2.0
"""What survives the loss of a process, and how long the others wait for it."""

from __future__ import annotations

from typing import ClassVar

from fleetlight.errors import StrategyError
from fleetlight.strategy.config_dicts import DurabilityConfigsDict
from fleetlight.strategy.feature import Checks, Chosen, Conflict, Conflicts, Feature
from fleetlight.strategy.features.a_sync import NO_SERVERS
from fleetlight.strategy.job import JobFacts
from fleetlight.strategy.settings import Effect, Nested, Settings, nested, setting, settings_class

#: the part of the deadline that a process may be away, since waits may have begun earlier
_PATIENT = 2 / 3

_KEPT = {
    "none": "a server that dies loses its values",
    "snapshot": "a server that dies resumes from its last snapshot and loses later updates",
    "log": "a server that dies resumes with all updates that it has acknowledged",
}


def _durability(strategy: DurabilityFeature, job: JobFacts) -> Effect:
    return (False, NO_SERVERS) if job.is_collective else (True, _KEPT[strategy.durability])


def _lost_worker(strategy: DurabilityFeature, job: JobFacts) -> Effect:
    if job.is_collective:
        return False, NO_SERVERS
    if job.worker_num == 1:
        return False, "the job has one worker and fails with it"
    if strategy.lost_worker == "fail":
        return True, "the job fails or restarts when a worker is lost"
    return True, "the other workers continue; the job fails only with worker 0"


def _check_away(strategy: DurabilityFeature, job: JobFacts) -> None:
    """Refuse an `away_s` that the deadline would cut short."""
    configs = strategy.durability_configs
    deadline_s = strategy["deadline_s"] if job.deadline_s is None else job.deadline_s
    if strategy.durability == "none" or configs.away_within(deadline_s) < deadline_s:
        return
    raise StrategyError(
        f"strategy.durability_configs: away_s = {configs.away_s:g}, expected less than deadline_s "
        f"= {deadline_s:g}: after deadline_s the others give up waiting for a process that is "
        "away, and the job fails; raise deadline_s or lower away_s"
    )


@settings_class
class DurabilityConfigs(Settings):
    """Where and how servers store their state.

    Example:
        >>> strategy = fleet.DistributedStrategy(durability="log")
        >>> strategy.durability_configs.folder = "/data/durability"
    """

    folder: str = setting("durability", "folder, in which each server has its own")
    sync: str = setting(
        "second",
        "when acknowledged updates are on disk: before the reply, within a second, or at some time",
        choices=("commit", "second", "never"),
    )
    snapshot_s: float = setting(300.0, "seconds between two snapshots of all rows", above=0)
    snapshot_mb: float = setting(
        1024.0, "MiB in the log after which a snapshot is taken sooner", above=0
    )
    away_s: float = setting(120.0, "how long a server or worker may be away", above=0, maximum=1e7)
    resume: bool = setting(False, "resume from an earlier job's state")

    def away_within(self, deadline_s: float) -> float:
        """`away_s`, reduced to fit the deadline unless the script has set it."""
        return self.away_s if self.is_set("away_s") else min(self.away_s, deadline_s * _PATIENT)


@settings_class
class DurabilityFeature(Feature):
    """What survives the loss of a process in a job with parameter servers."""

    CONFLICTS: ClassVar[Conflicts] = (
        Conflict(
            Chosen("durability", ("snapshot",)),
            Chosen("a_sync_configs.staleness"),
            "workers would wait for the steps that a killed server loses; durability = 'log' "
            "loses none",
        ),
    )
    CHECKS: ClassVar[Checks] = (_check_away,)

    durability: str = setting(
        "none",
        "what a parameter server restores after it was killed",
        effect=_durability,
        choices=tuple(_KEPT),
    )
    durability_configs: Nested[DurabilityConfigs, DurabilityConfigsDict] = nested(
        DurabilityConfigs, "where and how servers store it"
    )
    lost_worker: str = setting(
        "fail",
        "what a job with servers does when a worker other than 0 is lost",
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
    """The deadline of all waits."""

    deadline_s: float = setting(
        300.0, "how long a process may wait for a peer", effect=_deadline, above=0, maximum=1e7
    )
