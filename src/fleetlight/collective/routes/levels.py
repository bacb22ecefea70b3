# SPDX-License-Identifier: Apache-2.0
"""Which workers sum first among themselves, so that little crosses between hosts. Pure.

At each level the workers that are left form groups; the first of a group is its leader, takes the
group's sum and goes on to the next level. The last level is one group. Only host leaders meet
across hosts, so a host sends what a ring of H hosts sends, 2(H-1)/H of the bytes, however the
workers' indices lie on the hosts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fleetlight.collective.membership.members import MemberHello
from fleetlight.errors import counted

#: those of one level; all indices ascend, so a leader is the lowest of its group
Groups = list[list[int]]


def hosts_of(hellos: Mapping[int, MemberHello]) -> Groups:
    """The workers of each host, hosts in the order of their lowest worker."""
    hosts: dict[tuple[str, str], list[int]] = {}
    for index, hello in sorted(hellos.items()):
        hosts.setdefault((hello.address, hello.hostname), []).append(index)
    return list(hosts.values())


def groups_of(hellos: Mapping[int, MemberHello], inner: int = 0) -> Groups:
    """The inner groups: workers of one host, at most `inner` of them, 0: all."""
    return [
        host[start : start + (inner or len(host))]
        for host in hosts_of(hellos)
        for start in range(0, len(host), inner or len(host))
    ]


def levels_of(hellos: Mapping[int, MemberHello], inner: int = 0) -> list[Groups]:
    """The levels at which anything is summed; a single one is no hierarchy.

    Leaders of one host meet before those of several do: inner groups smaller than a host must not
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
    """The group of a worker at a level, empty where it is no longer there."""
    return next((group for group in level if index in group), ())


def described(levels: Sequence[Groups]) -> str:
    """How the workers come together, for the log."""
    inner = [f"{counted(len(level), 'group')} of {_sizes(level)}" for level in levels[:-1]]
    return ", then ".join([*inner, f"{_sizes(levels[-1])} leaders"])


def _sizes(level: Groups) -> str:
    smallest, largest = min(map(len, level)), max(map(len, level))
    return str(largest) if smallest == largest else f"{smallest} to {largest}"
