# SPDX-License-Identifier: Apache-2.0
"""Who sums with whom: every worker counts once, and only one of a host meets other hosts."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from fleetlight.collective.membership.members import MemberHello
from fleetlight.collective.routes.levels import (
    described,
    group_with,
    groups_of,
    hosts_of,
    levels_of,
)


def hellos(hosts: list[int]) -> dict[int, MemberHello]:
    """Workers on numbered hosts."""
    return {
        index: MemberHello(
            kind="worker", index=index, address=f"10.0.0.{host}", hostname=f"node{host}", pid=index
        )
        for index, host in enumerate(hosts)
    }


placed = st.lists(st.integers(0, 4), min_size=1, max_size=16)


@given(placed, st.integers(0, 6))
def test_inner_groups_have_every_worker_once_and_stay_on_a_host(
    hosts: list[int], inner: int
) -> None:
    groups = groups_of(hellos(hosts), inner)
    assert sorted(index for group in groups for index in group) == list(range(len(hosts)))
    for group in groups:
        assert len({hosts[index] for index in group}) == 1
        assert group == sorted(group)
        assert inner == 0 or len(group) <= inner
    if inner == 0:
        assert groups == hosts_of(hellos(hosts))


@given(placed, st.integers(0, 6))
def test_each_sum_goes_up_to_one_leader_and_one_of_a_host_crosses(
    hosts: list[int], inner: int
) -> None:
    left = set(range(len(hosts)))
    levels = levels_of(hellos(hosts), inner)
    for level in levels:
        members = [index for group in level for index in group]
        assert sorted(members) == sorted(left)
        left = {group[0] for group in level}
        across = [group for group in level if len({hosts[index] for index in group}) > 1]
        for group in across:
            assert len({hosts[index] for index in group}) == len(group)
    assert len(left) == 1
    if levels:
        assert len(levels[-1]) == 1
        assert all(any(len(group) > 1 for group in level) for level in levels)


def test_two_hosts_whatever_the_order_of_the_workers() -> None:
    assert levels_of(hellos([0, 0, 1, 1])) == [[[0, 1], [2, 3]], [[0, 2]]]
    assert levels_of(hellos([0, 1, 0, 1])) == [[[0, 2], [1, 3]], [[0, 1]]]
    assert levels_of(hellos([0, 1, 1])) == [[[0], [1, 2]], [[0, 1]]]


def test_inner_groups_smaller_than_a_host_meet_there_before_they_cross() -> None:
    levels = levels_of(hellos([0, 0, 0, 0, 1, 1, 1, 1]), 2)
    assert levels == [[[0, 1], [2, 3], [4, 5], [6, 7]], [[0, 2], [4, 6]], [[0, 4]]]
    assert levels_of(hellos([0] * 5), 2) == [[[0, 1], [2, 3], [4]], [[0, 2, 4]]]


def test_what_is_no_hierarchy_has_one_level_at_most() -> None:
    assert levels_of(hellos([0])) == []
    assert levels_of(hellos([0, 1, 2])) == [[[0, 1, 2]]]
    assert levels_of(hellos([0, 0, 0])) == [[[0, 1, 2]]]
    assert levels_of(hellos([0, 0, 0]), 3) == [[[0, 1, 2]]]
    assert levels_of(hellos([0, 0, 0]), 1) == [[[0, 1, 2]]]
    # a group never has workers of two hosts
    assert levels_of(hellos([0, 0, 1, 1]), 4) == levels_of(hellos([0, 0, 1, 1]))


def test_the_group_of_a_worker() -> None:
    first, second = levels_of(hellos([0, 0, 1, 1]))
    assert [group_with(index, first) for index in range(4)] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert [list(group_with(index, second)) for index in range(4)] == [[0, 2], [], [0, 2], []]


def test_the_log_says_how_workers_come_together() -> None:
    assert described(levels_of(hellos([0, 0, 1, 1]))) == "2 groups of 2, then 2 leaders"
    uneven = described(levels_of(hellos([0, 0, 0, 1]), 2))
    assert uneven == "3 groups of 1 to 2, then 2 groups of 1 to 2, then 2 leaders"
