# SPDX-License-Identifier: Apache-2.0
"""Membership: missing members, mismatches and assigned indices."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetlight.errors import MembershipError
from fleetlight.roles import members
from fleetlight.roles.members import MemberHello


def hello(index: int | None = 0, address: str = "10.0.0.1", **facts: object) -> MemberHello:
    given: dict[str, object] = {"torch": "2.13.0", "fleetlight": "0.1.0", **facts}
    return MemberHello(kind="worker", index=index, address=address, hostname="h", pid=7, **given)  # type: ignore[arg-type]


def test_a_hello_survives_encoding() -> None:
    greeting = hello(3, node_id="x")
    assert members.decode(members.encode(greeting)) == greeting


@pytest.mark.parametrize(
    ("data", "cause"),
    [
        (b"", "another program"),
        (b"{", "another program"),
        (b"\xff\x00", "another program"),
        (b"[]", "another version"),
        (b'{"kind": 3}', "another version"),
    ],
)
def test_an_invalid_hello_is_refused_with_its_cause(data: bytes, cause: str) -> None:
    with pytest.raises(MembershipError, match=f"no hello .*{cause}"):
        members.decode(data)


@pytest.mark.parametrize("fact", ["torch", "fleetlight", "backend"])
def test_workers_with_different_versions_are_named(fact: str) -> None:
    hellos = {0: hello(0), 1: hello(1), 2: hello(2, "10.0.0.9", **{fact: "other"})}
    with pytest.raises(MembershipError, match=rf"worker 0 .* runs {fact}.*worker 2 .*10\.0\.0\.9"):
        members.check_same_versions(hellos)
    members.check_same_versions({0: hello(0), 1: hello(1)})


def test_missing_workers_are_named_with_their_endpoints() -> None:
    text = members.missing_text(3, {1: hello(1)}, ["a:1", "b:2", "c:3"], 30)
    assert "1 of 3 workers joined within 30 s" in text
    assert "worker 0 (a:1), worker 2 (c:3)" in text


def test_workers_of_one_host_get_adjacent_indices() -> None:
    arrivals = [hello(None, "b"), hello(None, "a"), hello(None, "b"), hello(None, "a")]
    assert members.assign_indices(arrivals) == [0, 2, 1, 3]


def test_numeric_node_ids_are_indices() -> None:
    arrivals = [hello(None, node_id="2"), hello(None), hello(None, node_id="0")]
    assert members.assign_indices(arrivals) == [2, 1, 0]


def test_a_node_id_used_twice_is_refused() -> None:
    with pytest.raises(MembershipError, match="MS_NODE_ID=1"):
        members.assign_indices([hello(None, node_id="1"), hello(None, node_id="1")])


@given(st.lists(st.tuples(st.sampled_from("abc"), st.none() | st.sampled_from(["x", "y"]))))
def test_each_arrival_gets_a_distinct_index(places: list[tuple[str, str | None]]) -> None:
    arrivals = [hello(None, address, node_id=node) for address, node in places]
    assert sorted(members.assign_indices(arrivals)) == list(range(len(arrivals)))


def test_a_scheduler_names_present_and_missing_workers() -> None:
    hellos = [hello(None, node_id="0"), hello(None, node_id="2")]
    text = members.arrived_text("worker", 3, hellos, 5)
    assert "2 of 3 workers joined within 5 s, 1 missing (MS_NODE_ID 1)" in text
    assert "none" in members.arrived_text("worker", 3, [], 5)
    # for ids that are unique in the cluster, the missing ones are unknown
    hellos = [hello(None, node_id="2"), hello(None, node_id="3")]
    assert "2 of 3 workers joined within 5 s, 1 missing. Here: node 2" in members.arrived_text(
        "worker", 3, hellos, 5
    )


def test_a_server_at_a_loopback_address_is_refused_to_other_hosts() -> None:
    near, far = hello(0, "127.0.0.1"), hello(0, "10.0.0.1")
    for servers, workers in (([near], [near]), ([far], [near, far]), ([far], [far]), ([], [far])):
        members.check_reachable(servers, workers)
    with pytest.raises(MembershipError, match=r"server .*\(127\.0\.0\.1\) .*worker .*MS_WORKER_IP"):
        members.check_reachable([far, near], [near, far])
