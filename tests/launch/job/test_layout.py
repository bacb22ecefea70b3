# SPDX-License-Identifier: Apache-2.0
"""The order of machines, and the ranks of processes on them."""

import dataclasses
import json
from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetlight.errors import MembershipError
from fleetlight.launch.job.layout import JobLayout, Node, check, ordered
from fleetlight.launch.job.spec import RendezvousSpec
from fleetlight.roles.role import Kind

A = Node(host="10.0.0.1", workers=(("10.0.0.1", 1), ("10.0.0.1", 2)), master_port=9)
B = Node(host="10.0.0.2", workers=(("10.0.0.2", 1),), servers=(("10.0.0.2", 3),), master_port=8)
C = Node(host="10.0.0.10", servers=(("10.0.0.10", 3),), master_port=7)
MEETING = RendezvousSpec(master=("10.0.0.2", 6170), min_nodes=3, max_nodes=3)


def hosts(nodes: tuple[Node, ...]) -> list[str]:
    return [node.host for node in nodes]


def test_node_round_trips() -> None:
    node = dataclasses.replace(B, agreed=(("torch", "2"),), rank=1, restart=2)
    assert Node.from_dict(json.loads(json.dumps(node.to_dict()))) == node


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=5))
def test_every_index_exists_once_and_machines_are_contiguous(counts: list[tuple[int, int]]) -> None:
    nodes = tuple(
        Node(host="h", servers=(("h", 1),) * servers, workers=(("h", 2),) * workers)
        for servers, workers in counts
    )
    layouts = [JobLayout(nodes=nodes, own=own) for own in range(len(nodes))]
    members = [member for layout in layouts for member in layout.members()]
    for kind, total in (
        (Kind.SERVER, sum(s for s, _ in counts)),
        (Kind.WORKER, sum(w for _, w in counts)),
    ):
        found = [member for member in members if member.kind is kind]
        assert [member.index for member in found] == list(range(total))
        assert all(member.of == total for member in found)


def test_local_ranks_and_devices() -> None:
    workers = JobLayout(nodes=(B, A), own=1).members(devices=(3, 5))
    assert [(w.index, w.local_rank, w.local_size, w.device) for w in workers] == [
        (1, 0, 2, 3),
        (2, 1, 2, 5),
    ]
    assert (workers[0].title, workers[0].log_name) == ("worker 1 of 3", "workerlog.1")


def test_master_is_on_the_machine_of_worker_0() -> None:
    assert JobLayout(nodes=(C, A, B)).master == ("10.0.0.1", 9)


def test_list_determines_the_order() -> None:
    listed = dataclasses.replace(MEETING, hosts=("10.0.0.10", "10.0.0.1", "10.0.0.2"))
    for nodes in permutations((A, B, C)):
        assert hosts(ordered(nodes, listed)) == ["10.0.0.10", "10.0.0.1", "10.0.0.2"]


def test_order_without_a_list_is_master_then_numeric_addresses() -> None:
    for nodes in permutations((A, B, C)):
        assert hosts(ordered(nodes, MEETING)) == ["10.0.0.2", "10.0.0.1", "10.0.0.10"]


def test_requested_ranks_determine_the_order() -> None:
    nodes = [
        dataclasses.replace(A, rank=2),
        dataclasses.replace(B, rank=0),
        dataclasses.replace(C, rank=1),
    ]
    assert hosts(ordered(nodes, MEETING)) == ["10.0.0.2", "10.0.0.10", "10.0.0.1"]


def test_duplicate_rank_is_refused() -> None:
    with pytest.raises(MembershipError, match="two machines have --rank 1"):
        ordered([dataclasses.replace(one, rank=1) for one in (A, B)], MEETING)


def test_machine_started_twice_is_refused() -> None:
    listed = dataclasses.replace(MEETING, hosts=("10.0.0.1", "10.0.0.2"))
    with pytest.raises(MembershipError, match=r"got the machines 10.0.0.1, 10.0.0.1, expected"):
        ordered((A, A), listed)


def test_fatal_difference_names_both_machines() -> None:
    one = dataclasses.replace(A, agreed=(("the torch version", "2.13"),))
    two = dataclasses.replace(B, agreed=(("the torch version", "2.12"),))
    with pytest.raises(MembershipError, match=r"is 2.13 on 10.0.0.1 but 2.12 on 10.0.0.2"):
        check([one, two])


def test_other_differences_warn() -> None:
    one = dataclasses.replace(A, noted=(("script", "aa"), ("python version", "3")))
    two = dataclasses.replace(B, noted=(("script", "bb"), ("python version", "3")))
    assert check([one, two]) == [
        "warning: the script differs between the machines (10.0.0.1: aa, 10.0.0.2: bb)"
    ]


def test_job_needs_workers_and_servers() -> None:
    with pytest.raises(MembershipError, match="no machine has a worker"):
        check([C])
    with pytest.raises(MembershipError, match="no machine has a server"):
        check([dataclasses.replace(A, collective=False)])
    assert check([dataclasses.replace(one, collective=False) for one in (A, C)]) == []


def test_late_machine_adopts_the_restart_count() -> None:
    layout = JobLayout(nodes=(dataclasses.replace(A, restart=3, failures=1), B))
    assert (layout.restart, layout.failures) == (3, 1)
