# SPDX-License-Identifier: Apache-2.0
"""Chooses the route of a job's gradients, and opens its connections."""

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
    """The settings of a strategy that choose a route."""

    shared_memory: bool = True
    #: size of groups that sum first; 0: the workers of a host; None: no hierarchy
    inner: int | None = None
    #: the number of process groups that take turns
    communicators: int = 1
    #: the type of values between hosts
    narrow: torch.dtype | None = None
    #: the codec of covered values between hosts
    compression: Compression | None = None


def route_of(group: Group, options: RouteOptions) -> Route | None:
    """The route of plain tensors in main memory; None: the process groups of all workers.

    All workers call it with the same options.
    """
    if group.is_encrypted and options.inner is None:
        # with TLS, only one worker of a host sends to other hosts
        options = dataclasses.replace(options, inner=0)
    levels = [] if options.inner is None else levels_of(group.hellos, options.inner)
    if options.compression is not None and not group.alone:
        return _hierarchy(group, levels or [[list(range(group.size))]], options)
    if takes_levels(group, levels):
        return _hierarchy(group, levels, options)
    return shared_memory_of(group) if options.shared_memory else None


def senders(group: Group, inner: int | None) -> Sequence[int]:
    """The workers that send messages of a codec: the leaders of all groups that sum first."""
    levels = [] if inner is None else levels_of(group.hellos, inner)
    return levels[-1][0] if levels else range(group.size)


def crosses_a_link(group: Group, shared_memory: bool) -> bool:
    """False where all workers share the memory of one host, so that a codec would save nothing."""
    return len(hosts_of(group.hellos)) > 1 or not shared_memory


def takes_levels(group: Group, levels: Sequence[Groups], *, coded: bool = False) -> bool:
    """True for a hierarchy that takes effect: NCCL has its own, except for `coded` buckets."""
    return len(levels) > 1 and (coded or group.backend == "gloo")


def _hierarchy(group: Group, levels: Sequence[Groups], options: RouteOptions) -> Hierarchy:
    *inside, leaders = levels
    pooled = _PooledGroups(group)
    here = _in_memory(group, inside) if inside and options.shared_memory else None
    if here is None:
        here = [GroupLevel(made) for level in inside for made in pooled.acquire(level)]
    if group.index == 0 and inside:
        logger.info("hierarchical all_reduce: %s", described(levels))
    turns = GroupRotation(pooled.acquire(leaders, options.communicators))
    coded = None
    if options.compression is not None:
        coded = _coded(options.compression, turns, leaders, pooled)
    plain = PlainExchange(turns, options.narrow)
    return Hierarchy(group.index, group.size, here, plain, coded, pooled.release_all)


def _coded(
    compression: Compression, turns: GroupRotation, leaders: Groups, pooled: _PooledGroups
) -> AllGatherExchange | TwoShotExchange:
    """Two senders need each other's whole message; among more, chunks send fewer bytes."""
    if compression.codec.divisible and len(leaders[0]) > 2:
        return TwoShotExchange(turns, GroupRotation(pooled.acquire(leaders)), compression)
    return AllGatherExchange(turns, compression)


def _in_memory(group: Group, inside: Sequence[Groups]) -> list[Level] | None:
    """This worker's levels in shared memory; None unless all workers can have it."""
    mine = [set(group_with(group.index, level)) - {group.index} for level in inside]
    peers = connected(group, set().union(*mine))
    if peers is None:
        return None
    # two workers share at most one group, so each connection has one user
    return [
        MemoryLevel(group.index, {index: peers[index] for index in others})
        for others in mine
        if others
    ]


class _PooledGroups:
    """Process groups of `Group` that a route has acquired."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._acquired: list[tuple[Parts, int, list[dist.ProcessGroup]]] = []

    def acquire(self, level: Groups, count: int = 1) -> list[dist.ProcessGroup]:
        """Acquire process groups of this worker's group at a level."""
        parts = tuple(tuple(part) for part in level if len(part) > 1)
        groups = self._group.acquire(parts, count)
        self._acquired.append((parts, count, groups))
        return groups

    def release_all(self) -> None:
        """Release all of them."""
        for parts, count, groups in self._acquired:
            self._group.release(parts, count, groups)
        self._acquired.clear()
