# SPDX-License-Identifier: Apache-2.0
"""The facts about a job that decide whether a setting takes effect."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class JobFacts:
    """The facts about a job; by default one process on a CPU."""

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
