# SPDX-License-Identifier: Apache-2.0
"""Which route the gradients of a job take, and what is opened for it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
import torch.distributed as dist

from fleetlight.collective.codecs.compression import Compression
from fleetlight.collective.group import Group, Parts
from fleetlight.collective.routes.exchange import (
    AllGatherExchange,
    GroupRotation,
    PlainExchange,
    TwoShotExchange,
)
from fleetlight.collective.routes.hierarchy import GroupLevel, Hierarchy, Level
from fleetlight.collective.routes.levels import (
    Groups,
    described,
    group_with,
    hosts_of,
    levels_of,
)
from fleetlight.collective.routes.local_peers import connected, shared_memory_of
from fleetlight.collective.routes.memory_level import MemoryLevel
from fleetlight.collective.routes.route import Route
from fleetlight.observe.log import logger


@dataclasses.dataclass(frozen=True, kw_only=True)
class RouteOptions:
    """What is asked of a route."""

    shared_memory: bool = True
    #: workers that sum first among themselves, 0: those of a host; None: all at once
    inner: int | None = None
    #: process groups that take turns
    communicators: int = 1
    #: the type in which values travel where hosts meet
    narrow: torch.dtype | None = None
    #: the form in which those travel there that it covers
    compression: Compression | None = None


def route_of(group: Group, wishes: RouteOptions) -> Route | None:
    """The route of plain tensors in main memory; None: the process groups of all workers.

    All workers come here alike.
    """
    if group.is_encrypted and wishes.inner is None:
        # inside TLS, only one worker of a host sends to other hosts
        wishes = dataclasses.replace(wishes, inner=0)
    levels = [] if wishes.inner is None else levels_of(group.hellos, wishes.inner)
    if wishes.compression is not None and not group.alone:
        return _hierarchy(group, levels or [[list(range(group.size))]], wishes)
    if takes_levels(group, levels):
        return _hierarchy(group, levels, wishes)
    return shared_memory_of(group) if wishes.shared_memory else None


def senders(group: Group, inner: int | None) -> Sequence[int]:
    """The workers that send messages of a codec: of those that sum first, one."""
    levels = [] if inner is None else levels_of(group.hellos, inner)
    return levels[-1][0] if levels else range(group.size)


def crosses_a_link(group: Group, shared_memory: bool) -> bool:
    """False where all workers are on one host, so that a codec would cost and spare nothing.

    Who wants them to do without shared memory gets what workers of several hosts do.
    """
    return len(hosts_of(group.hellos)) > 1 or not shared_memory


def takes_levels(group: Group, levels: Sequence[Groups], *, coded: bool = False) -> bool:
    """Whether these levels are a hierarchy, and taken: NCCL finds its own way through the hosts.

    What is `coded` is in main memory, and does not go through it.
    """
    return len(levels) > 1 and (coded or group.backend == "gloo")


def _hierarchy(group: Group, levels: Sequence[Groups], wishes: RouteOptions) -> Hierarchy:
    *inside, leaders = levels
    loans = _Loans(group)
    here = _in_memory(group, inside) if inside and wishes.shared_memory else None
    if here is None:
        here = [GroupLevel(made) for level in inside for made in loans.take(level)]
    if group.index == 0 and inside:
        logger.info("hierarchical all_reduce: %s", described(levels))
    turns = GroupRotation(loans.take(leaders, wishes.communicators))
    coded = None
    if wishes.compression is not None:
        coded = _coded(wishes.compression, turns, leaders, loans)
    plain = PlainExchange(turns, wishes.narrow)
    return Hierarchy(group.index, group.size, here, plain, coded, loans.give_back)


def _coded(
    compression: Compression, turns: GroupRotation, leaders: Groups, loans: _Loans
) -> AllGatherExchange | TwoShotExchange:
    """Where two meet, each needs all that the other has; among more, chunks are less."""
    if compression.codec.divisible and len(leaders[0]) > 2:
        return TwoShotExchange(turns, GroupRotation(loans.take(leaders)), compression)
    return AllGatherExchange(turns, compression)


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
