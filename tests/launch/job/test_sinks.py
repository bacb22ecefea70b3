# SPDX-License-Identifier: Apache-2.0
"""`--sinks`: worker 0 gets the services for metrics, fleetrun keeps the collector of events."""

import pytest

from fleetlight.errors import ConfigError, StrategyError
from fleetlight.launch.inventory import Machine
from fleetlight.launch.job.options import LaunchOptions
from fleetlight.launch.job.plan import plan
from fleetlight.launch.job.spec import JobSpec, Sinks
from fleetlight.observe.sinks.services import _KINDS
from fleetlight.strategy import DistributedStrategy, JobFacts
from fleetlight.strategy.features.sinks import SINK_KINDS

CPU = Machine(cores=8, addresses=(("lo", "127.0.0.1"),))


def job(sinks: str | None) -> JobSpec:
    return plan(LaunchOptions(script="t.py", sinks=sinks), CPU)


@pytest.mark.parametrize(
    ("sinks", "metrics", "events"),
    [
        (None, None, None),
        ("", "", None),
        ("tensorboard:runs,wandb", "tensorboard:runs,wandb", None),
        ("opentelemetry", "", ""),
        ("opentelemetry:http://c:4318", "", "http://c:4318"),
        ("wandb:x, opentelemetry ,mlflow:http://h:1", "wandb:x,mlflow:http://h:1", ""),
    ],
)
def test_each_service_goes_to_the_process_that_feeds_it(
    sinks: str | None, metrics: str | None, events: str | None
) -> None:
    found = job(sinks)
    assert found.sinks == Sinks(metrics=metrics, events=events)
    assert found.environment.get("FLEET_SINKS") == metrics


@pytest.mark.parametrize(
    ("sinks", "message"),
    [
        ("wandb:x,tensorbord:runs", r"got 'tensorbord:runs'; did you mean 'tensorboard'\?"),
        ("csv", "got 'csv'; known names: mlflow, opentelemetry, python, tensorboard, wandb"),
        ("opentelemetry:collector", "expected the address of a collector, such as"),
    ],
)
def test_a_mistake_is_refused_before_a_process_starts(sinks: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        job(sinks)


def test_an_engine_starts_processes_of_which_fleetrun_records_nothing() -> None:
    options = LaunchOptions(script="t.py", sinks="opentelemetry", on="slurm", nproc_per_node=1)
    with pytest.raises(ConfigError, match="not of a job with --on slurm; omit it"):
        plan(options, None)


def test_a_worker_sends_no_events() -> None:
    strategy = DistributedStrategy(sinks="opentelemetry")
    with pytest.raises(StrategyError, match="pass fleetrun --sinks opentelemetry"):
        strategy.check(JobFacts(worker_num=1))


def test_fleetrun_knows_the_services_that_a_worker_knows() -> None:
    assert set(SINK_KINDS) == set(_KINDS)
