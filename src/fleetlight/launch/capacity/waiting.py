# SPDX-License-Identifier: Apache-2.0
"""How long workers wait for each other at shared resources; pure.

A closed queueing network: each worker repeats one cycle of stages. A resource of capacity c serves
c of its n users at full speed. It is full when a cycle takes n/c times its seconds.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

#: Mean wait behind a user that is being served, as a share of its service. Of services of equal
#: length one half is left on average; of exponential ones all.
_RESIDUE = 0.5
#: halvings of the interval that contains the time of a cycle
_HALVINGS = 40


@dataclasses.dataclass(frozen=True)
class Resource:
    """Something that several workers use."""

    #: what the limit is called, such as `link`
    kind: str
    #: seconds of one cycle of one worker
    seconds: float
    #: workers that use it, and how many of them at full speed
    users: int
    capacity: float

    @property
    def full_s(self) -> float:
        """A cycle when the resource never rests."""
        return self.seconds * self.users / self.capacity

    def slower(self, cycle_s: float) -> float:
        """How many times as long a worker takes here, in cycles of this length."""
        others = _RESIDUE * (self.users - 1) * self.seconds / (self.capacity * cycle_s)
        return max(1.0, 1 / self.capacity / max(1e-9, 1 - others))


@dataclasses.dataclass(frozen=True)
class Stage:
    """A part of the cycle: seconds at resources that work at the same time, by their name."""

    kind: str
    seconds: Mapping[str, float]
    #: seconds that no resource shortens
    delay_s: float = 0.0

    @property
    def alone_s(self) -> float:
        """The time of one worker alone."""
        return max(self.seconds.values(), default=0.0) + self.delay_s

    def loaded_s(self, resources: Mapping[str, Resource], cycle_s: float) -> float:
        """The mean time beside the other workers."""
        times = [t * resources[name].slower(cycle_s) for name, t in self.seconds.items()]
        return max(times, default=0.0) + self.delay_s

    def all_s(self, resources: Mapping[str, Resource]) -> float:
        """The time of all workers, when they arrive together."""
        full = [
            t * max(1.0, resources[name].users / resources[name].capacity)
            for name, t in self.seconds.items()
        ]
        return max(full, default=0.0) + self.delay_s


Path = Sequence[Stage]


def paced(paths: Sequence[Path], resources: Mapping[str, Resource]) -> tuple[float, str]:
    """The cycle of workers that do not wait for each other, and what limits it.

    The paths run beside each other. A longer cycle means less waiting, so there is one solution.
    """
    full = max(resources.values(), key=lambda one: one.full_s)
    low = max(full.full_s, *(sum(s.alone_s for s in path) for path in paths))
    high = max(sum(s.all_s(resources) for s in path) for path in paths) + low
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if _longest(paths, resources, middle) > middle else (low, middle)
    if high <= full.full_s * (1 + 1e-6):
        return full.full_s, full.kind
    path = max(paths, key=lambda path: sum(s.loaded_s(resources, high) for s in path))
    return high, max(path, key=lambda s: s.loaded_s(resources, high)).kind


def _longest(paths: Sequence[Path], resources: Mapping[str, Resource], cycle_s: float) -> float:
    return max(sum(s.loaded_s(resources, cycle_s) for s in path) for path in paths)


def together(
    paths: Sequence[Path], resources: Mapping[str, Resource], slowest: Stage
) -> tuple[float, str]:
    """The cycle of workers that begin each step together, and what limits it.

    They reach a stage at about the same time and share it. If they shared it evenly, the stages
    would add up: no link works while all compute. If one after the other passed it, the stages of
    the longest kind would hide the queues of all others. Jobs are halfway between.
    """
    full = max(resources.values(), key=lambda one: one.full_s)
    path = max(paths, key=lambda path: _all_s(path, resources))
    evenly = _all_s(path, resources)
    in_turn = max((_in_turn_s(path, resources, stage.kind) for stage in path), default=0.0)
    time = (evenly + in_turn) / 2 + slowest.delay_s
    if time <= full.full_s:
        return full.full_s, full.kind
    return time, max([*path, slowest], key=lambda stage: stage.all_s(resources)).kind


def _all_s(path: Path, resources: Mapping[str, Resource]) -> float:
    return sum(stage.all_s(resources) for stage in path)


def _in_turn_s(path: Path, resources: Mapping[str, Resource], kind: str) -> float:
    """The cycle when only the queues at stages of one kind are seen."""
    return sum(s.all_s(resources) if s.kind == kind else s.alone_s for s in path)
