# SPDX-License-Identifier: Apache-2.0
"""The few facts of a job that decide whether a setting takes effect."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class JobFacts:
    """What `explain()` must know about the job; by default one process on a CPU."""

    is_collective: bool = True
    worker_num: int = 1
    server_num: int = 0
    node_num: int = 1
    backend: str = "gloo"
    #: the deadline in force and who says so; None before `fleet.init`
    deadline_s: float | None = None
    deadline_from: str = ""
    #: the folder of certificates that connections were opened with
    ssl: str | None = None
    #: the folder that it saves into by itself
    checkpoint: str = ""
    #: True once a static program is being written
    has_programs: bool = False


_current = JobFacts()


def current_job() -> JobFacts:
    """The facts of the job this process is in."""
    return _current


def note_program() -> None:
    """The script writes static programs."""
    global _current
    if not _current.has_programs:
        _current = dataclasses.replace(_current, has_programs=True)


def forget_job() -> None:
    """This process is in no job any more."""
    global _current
    _current = JobFacts()


def set_current_job(facts: JobFacts) -> None:
    """Called once the job is known."""
    global _current
    _current = dataclasses.replace(facts, has_programs=_current.has_programs)
