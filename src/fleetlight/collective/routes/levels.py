# SPDX-License-Identifier: Apache-2.0
"""Levels of a hierarchical all-reduce: which workers sum first among themselves. Pure.

At each level the remaining workers form groups. The first worker of a group is its leader: it takes
the sum of the group to the next level. The last level is one group. Only host leaders send across
hosts, so a host sends 2(H-1)/H of the bytes, as in a ring of H hosts, in any order of indices.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fleetlight.errors import counted
from fleetlight.roles.members import MemberHello

#: the groups of one level; indices ascend, so the leader is the lowest of its group
Groups = list[list[int]]


def hosts_of(hellos: Mapping[int, MemberHello]) -> Groups:
    """The workers of each host, hosts in the order of their lowest worker."""
    hosts: dict[tuple[str, str], list[int]] = {}
    for index, hello in sorted(hellos.items()):
        hosts.setdefault((hello.address, hello.hostname), []).append(index)
    return list(hosts.values())


def groups_of(hellos: Mapping[int, MemberHello], inner: int = 0) -> Groups:
    """The inner groups: at most `inner` workers of one host; 0: all of them."""
    return [
        host[start : start + (inner or len(host))]
        for host in hosts_of(hellos)
        for start in range(0, len(host), inner or len(host))
    ]


def levels_of(hellos: Mapping[int, MemberHello], inner: int = 0) -> list[Groups]:
    """The levels that sum; a single one is no hierarchy.

    Leaders of one host sum before those of several do: inner groups smaller than a host must not
    make it send more than its share.
    """
    leaders = {group[0] for group in groups_of(hellos, inner)}
    hosts = hosts_of(hellos)
    levels = [
        groups_of(hellos, inner),
        [[index for index in host if index in leaders] for host in hosts],
        [[host[0] for host in hosts]],
    ]
    return [level for level in levels if any(len(group) > 1 for group in level)]


def group_with(index: int, level: Groups) -> Sequence[int]:
    """The group of a worker at a level; empty where it no longer takes part."""
    return next((group for group in level if index in group), ())


def described(levels: Sequence[Groups]) -> str:
    """The levels as text for the log."""
    inner = [f"{counted(len(level), 'group')} of {_sizes(level)}" for level in levels[:-1]]
    return ", then ".join([*inner, f"{_sizes(levels[-1])} leaders"])


def _sizes(level: Groups) -> str:
    smallest, largest = min(map(len, level)), max(map(len, level))
    return str(largest) if smallest == largest else f"{smallest} to {largest}"
