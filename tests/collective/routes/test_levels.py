# SPDX-License-Identifier: Apache-2.0
"""Groups of the hierarchy: every worker is in one group, and one worker per host crosses hosts."""

from hypothesis import given
from hypothesis import strategies as st

from fleetlight.collective.routes.levels import (
    described,
    group_with,
    groups_of,
    hosts_of,
    levels_of,
)
from fleetlight.roles.members import MemberHello


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
def test_inner_groups_partition_the_workers_of_each_host(hosts: list[int], inner: int) -> None:
    groups = groups_of(hellos(hosts), inner)
    assert sorted(index for group in groups for index in group) == list(range(len(hosts)))
    for group in groups:
        assert len({hosts[index] for index in group}) == 1
        assert group == sorted(group)
        assert inner == 0 or len(group) <= inner
    if inner == 0:
        assert groups == hosts_of(hellos(hosts))


@given(placed, st.integers(0, 6))
def test_each_level_has_one_leader_per_group(hosts: list[int], inner: int) -> None:
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


def test_two_hosts_form_two_levels_in_any_worker_order() -> None:
    assert levels_of(hellos([0, 0, 1, 1])) == [[[0, 1], [2, 3]], [[0, 2]]]
    assert levels_of(hellos([0, 1, 0, 1])) == [[[0, 2], [1, 3]], [[0, 1]]]
    assert levels_of(hellos([0, 1, 1])) == [[[0], [1, 2]], [[0, 1]]]


def test_small_inner_groups_are_summed_per_host_first() -> None:
    levels = levels_of(hellos([0, 0, 0, 0, 1, 1, 1, 1]), 2)
    assert levels == [[[0, 1], [2, 3], [4, 5], [6, 7]], [[0, 2], [4, 6]], [[0, 4]]]
    assert levels_of(hellos([0] * 5), 2) == [[[0, 1], [2, 3], [4]], [[0, 2, 4]]]


def test_flat_topologies_have_at_most_one_level() -> None:
    assert levels_of(hellos([0])) == []
    assert levels_of(hellos([0, 1, 2])) == [[[0, 1, 2]]]
    assert levels_of(hellos([0, 0, 0])) == [[[0, 1, 2]]]
    assert levels_of(hellos([0, 0, 0]), 3) == [[[0, 1, 2]]]
    assert levels_of(hellos([0, 0, 0]), 1) == [[[0, 1, 2]]]
    # a group never spans two hosts
    assert levels_of(hellos([0, 0, 1, 1]), 4) == levels_of(hellos([0, 0, 1, 1]))


def test_group_with_finds_the_group_of_a_worker() -> None:
    first, second = levels_of(hellos([0, 0, 1, 1]))
    assert [group_with(index, first) for index in range(4)] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert [list(group_with(index, second)) for index in range(4)] == [[0, 2], [], [0, 2], []]


def test_the_levels_are_described() -> None:
    assert described(levels_of(hellos([0, 0, 1, 1]))) == "2 groups of 2, then 2 leaders"
    uneven = described(levels_of(hellos([0, 0, 0, 1]), 2))
    assert uneven == "3 groups of 1 to 2, then 2 groups of 1 to 2, then 2 leaders"
