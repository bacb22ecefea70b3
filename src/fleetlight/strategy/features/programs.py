# SPDX-License-Identifier: Apache-2.0
"""How static programs run."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from fleetlight.errors import counted
from fleetlight.strategy.config_dicts import ExecutionStrategyDict
from fleetlight.strategy.feature import Feature
from fleetlight.strategy.job import JobFacts
from fleetlight.strategy.settings import Effect, Nested, Settings, nested, setting, settings_class


def _fetch(strategy: ProgramsFeature, job: JobFacts) -> Effect:
    if job.has_programs:
        every = strategy.fetch_frequency
        return True, f"a program computes what is fetched on every {every}. run"
    return False, "it is for static programs; an eager loop calls loss.item() when it needs it"


def _execution(strategy: ProgramsFeature, job: JobFacts) -> Effect:
    if job.has_programs:
        return True, "how programs run"
    return False, (
        "it is for static programs; for an eager loop OMP_NUM_THREADS or torch.set_num_threads "
        "set the threads of an operator, and reference counts free memory at once"
    )


def _threads(strategy: ProgramsFeature, job: JobFacts) -> Effect:
    threads = counted(strategy.execution_strategy.num_threads, "thread")
    return True, f"operators of a program run on {threads}"


def _drop_scope(strategy: ProgramsFeature, job: JobFacts) -> Effect:
    return False, "reference counts free memory at once, so there is no scope to drop"


@settings_class
class ExecutionStrategy(Settings):
    """How static programs run; `explain()` describes each setting.

    Example:
        >>> strategy = fleet.DistributedStrategy(execution_strategy={"num_threads": 4})
        >>> strategy.execution_strategy.num_threads
        4
    """

    num_threads: int = setting(1, "threads that run operators", effect=_threads, minimum=1)
    num_iteration_per_drop_scope: int = setting(
        10, "steps between memory clean-ups", effect=_drop_scope, minimum=1
    )


@settings_class
class ProgramsFeature(Feature):
    """Fetching and threads of static programs."""

    ALIASES: ClassVar = {"exec_strategy": "execution_strategy"}

    fetch_frequency: int = setting(1, "fetch values every n steps", effect=_fetch, minimum=1)
    execution_strategy: Nested[ExecutionStrategy, ExecutionStrategyDict] = nested(
        ExecutionStrategy, "how programs run", effect=_execution
    )

    if TYPE_CHECKING:  # the key of ALIASES
        exec_strategy: Nested[ExecutionStrategy, ExecutionStrategyDict] = nested(
            ExecutionStrategy, "how programs run"
        )
