# SPDX-License-Identifier: Apache-2.0
"""Where the metrics of a job go besides its log folder."""

from __future__ import annotations

from typing import ClassVar

from fleetlight.errors import StrategyError
from fleetlight.strategy.feature import Checks, Feature
from fleetlight.strategy.job import JobFacts
from fleetlight.strategy.settings import Effect, setting, settings_class

#: services that worker 0 sends metrics to
SINK_KINDS = ("tensorboard", "mlflow", "wandb", "python")
#: gets events, which fleetrun sends
OPENTELEMETRY = "opentelemetry"


def _sinks(strategy: SinksFeature, job: JobFacts) -> Effect:
    if not strategy.sinks:
        return True, "metrics go into the log folder only"
    if job.deadline_s is not None and job.sinks != strategy.sinks:
        force = f"in force is {job.sinks!r}" if job.sinks else "the job has no sinks"
        return False, f"it takes effect only when given to fleet.init; {force}"
    return True, f"worker 0 sends the job's metrics to {strategy.sinks}"


def _every(strategy: SinksFeature, job: JobFacts) -> Effect:
    if not strategy.sinks:
        return False, "the job has no sinks"
    return True, f"sinks get metrics each {strategy.sinks_every_s:g} s"


def _check_sinks(strategy: SinksFeature, job: JobFacts) -> None:
    for one in filter(None, map(str.strip, strategy.sinks.split(","))):
        kind = one.partition(":")[0]
        if kind == OPENTELEMETRY:
            raise StrategyError(
                f"strategy.sinks: got {one!r}, which gets the events that fleetrun records; pass "
                "fleetrun --sinks opentelemetry, or after the job: fleetlight events LOGDIR "
                "--export"
            )
        if kind not in SINK_KINDS:
            raise StrategyError(
                f"strategy.sinks: got {one!r}, expected one of {', '.join(SINK_KINDS)}, each with "
                "a place after a colon, as in 'tensorboard:runs'"
            )


@settings_class
class SinksFeature(Feature):
    """Services that receive the metrics of the job."""

    sinks: str = setting(
        "",
        "services for metrics, such as 'tensorboard:runs,mlflow:URI,wandb:PROJECT'; '': none",
        effect=_sinks,
        variable="FLEET_SINKS",
    )
    sinks_every_s: float = setting(
        10.0, "seconds between two readings of sinks", effect=_every, above=0
    )

    CHECKS: ClassVar[Checks] = (_check_sinks,)
