# SPDX-License-Identifier: Apache-2.0
"""Which route the gradients of a job take, and what is opened for it."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist

from fleetlight.collective.group import Group, Parts
from fleetlight.collective.routes.hierarchy import GroupLevel, Hierarchy, Level
from fleetlight.collective.routes.levels import Groups, described, group_with, levels_of
from fleetlight.collective.routes.memory_level import MemoryLevel
from fleetlight.collective.routes.neighbours import connected, shared_memory_of
from fleetlight.collective.routes.route import Route
from fleetlight.observe.log import logger


def route_of(
    group: Group, *, shared_memory: bool = True, inner: int | None = None, communicators: int = 1
) -> Route | None:
    """The route of plain tensors in main memory; None: the process groups of all workers.

    `inner` asks for a hierarchy, and says how many workers form an inner group, 0: those of a host.
    All workers come here alike.
    """
    levels = [] if inner is None else levels_of(group.hellos, inner)
    # NCCL finds its own way through the hosts
    if len(levels) > 1 and group.backend == "gloo":
        return _hierarchy(group, levels, shared_memory, communicators)
    return shared_memory_of(group) if shared_memory else None


def _hierarchy(
    group: Group, levels: Sequence[Groups], shared_memory: bool, communicators: int
) -> Hierarchy:
    *inside, leaders = levels
    loans = _Loans(group)
    here = _in_memory(group, inside) if shared_memory else None
    if here is None:
        here = [GroupLevel(made) for level in inside for made in loans.take(level)]
    if group.index == 0:
        logger.info("hierarchical all_reduce: %s", described(levels))
    return Hierarchy(
        group.index, group.size, here, loans.take(leaders, communicators), loans.give_back
    )


def _in_memory(group: Group, inside: Sequence[Groups]) -> list[Level] | None:
    """This worker's levels in shared memory, if all workers can have it. All of them come here."""
    mine = [set(group_with(group.index, level)) - {group.index} for level in inside]
    peers = connected(group, set().union(*mine))
    if peers is None:
        return None
    # two workers are together in one group at most, so no connection is used twice
    return [
        MemoryLevel(group.index, {index: peers[index] for index in others})
        for others in mine
        if others
    ]


class _Loans:
    """Process groups that a route has from the group of all workers."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._taken: list[tuple[Parts, int, list[dist.ProcessGroup]]] = []

    def take(self, level: Groups, count: int = 1) -> list[dist.ProcessGroup]:
        """Those of this worker's group at a level."""
        parts = tuple(tuple(part) for part in level if len(part) > 1)
        groups = self._group.lend(parts, count)
        self._taken.append((parts, count, groups))
        return groups

    def give_back(self) -> None:
        """The route needs them no more."""
        for parts, count, groups in self._taken:
            self._group.take_back(parts, count, groups)
        self._taken.clear()
