# SPDX-License-Identifier: Apache-2.0
"""Where the processes of a job are, by what its batch script prints. Pure."""

from __future__ import annotations

import dataclasses
import re

from fleetlight.roles.placement import TaskPlace, expanded, places_of

_START = re.compile(
    r"^start (?P<start>\d+): tasks (?P<tasks>[\d,()x]+) on (?P<nodes>\S+), "
    r"servers (?P<servers>\d+) (?P<rule>spread|pack)$",
    re.MULTILINE,
)
#: srun names the tasks that end with an error, such as `tasks 0-2,4`
_END = re.compile(r"^srun: error: \S+: tasks? (?P<tasks>[\d,-]+): (?P<how>.+)$", re.MULTILINE)


@dataclasses.dataclass(frozen=True, kw_only=True)
class JobStart:
    """The last start of a job."""

    #: Slurm's compressed list
    nodes: str
    places: list[TaskPlace]
    #: how tasks ended that have failed
    ends: dict[int, str]


def last_start(output: str) -> JobStart | None:
    """The last start that the output of a batch script tells of."""
    starts = list(_START.finditer(output))
    if not starts:
        return None
    last = starts[-1]
    tasks = expanded(last["tasks"]) or []
    ends = {
        task: end["how"]
        for end in _END.finditer(output, last.end())
        for task in _numbers(end["tasks"])
    }
    places = places_of(
        tasks, "block", int(last["servers"]), "pack" if last["rule"] == "pack" else "spread"
    )
    return JobStart(nodes=last["nodes"], places=places, ends=ends)


def _numbers(text: str) -> list[int]:
    """The numbers in a list such as `0-2,4`."""
    found: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return found
