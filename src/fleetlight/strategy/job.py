# SPDX-License-Identifier: Apache-2.0
"""The facts about a job that decide whether a setting takes effect."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class JobFacts:
    """The facts about a job, for `DistributedStrategy.explain`; by default one process on a CPU.

    Args:
        is_collective: True for a job without parameter servers.
        worker_num: the number of workers.
        server_num: the number of parameter servers.
        node_num: the number of hosts.
        backend: what the workers communicate by: `"gloo"` or `"nccl"`.
        deadline_s: the deadline in force; None before `fleet.init`.
        deadline_from: what set the deadline.
        ssl: the folder of certificates that the connections use.
        checkpoint: the folder for automatic checkpoints.
        sinks: the services that get the job's metrics.
        has_programs: True once the script has begun a static program.

    Example:
        >>> from fleetlight.strategy import JobFacts
        >>> strategy = fleet.DistributedStrategy(a_sync=True)
        >>> strategy.inert(JobFacts(worker_num=4))
        ['strategy.a_sync = True has no effect: a collective job has no parameter servers']
    """

    is_collective: bool = True
    worker_num: int = 1
    server_num: int = 0
    node_num: int = 1
    backend: str = "gloo"
    #: the deadline in force and its source; None before `fleet.init`
    deadline_s: float | None = None
    deadline_from: str = ""
    #: the folder of certificates that the connections use
    ssl: str | None = None
    #: the folder for automatic checkpoints
    checkpoint: str = ""
    #: the services that get the job's metrics
    sinks: str = ""
    #: True once the script has begun a static program
    has_programs: bool = False

    @property
    def given(self) -> tuple[str, ...]:
        """The settings in whose place a variable of the job is in force."""
        is_variable = self.deadline_from not in ("", "the default", "the strategy")
        return ("deadline_s",) if is_variable else ()


_current = JobFacts()


def current_job() -> JobFacts:
    """The facts about this process's job."""
    return _current


def note_program() -> None:
    """Record that the script uses static programs."""
    global _current
    if not _current.has_programs:
        _current = dataclasses.replace(_current, has_programs=True)


def forget_job() -> None:
    """Reset the facts after the end of a job."""
    global _current
    _current = JobFacts()


def set_current_job(facts: JobFacts) -> None:
    """Set the facts once the job has formed."""
    global _current
    _current = dataclasses.replace(facts, has_programs=_current.has_programs)
