# SPDX-License-Identifier: Apache-2.0
"""`Role` and endpoints."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleetlight.errors import RoleError
from fleetlight.roles import Kind, Role, endpoint_text, parse_endpoint, parse_endpoints


def test_default_is_a_single_worker() -> None:
    role = Role()
    assert role.is_worker
    assert not role.is_server
    assert (role.index, role.worker_num, role.server_num, role.dialect) == (0, 1, 0, "single")


def test_invalid_roles_are_refused() -> None:
    with pytest.raises(RoleError, match="at least 1 worker, got worker_num=0"):
        Role(worker_num=0)
    with pytest.raises(RoleError, match="index=2, expected 0 to 1 for 2 workers"):
        Role(index=2, worker_num=2)
    with pytest.raises(RoleError, match="index=1, expected 0 to 0 for 1 servers"):
        Role(kind=Kind.SERVER, index=1, worker_num=4, server_num=1)
    with pytest.raises(RoleError, match="index=1, expected 0 to 0 for 1 schedulers"):
        Role(kind=Kind.SCHEDULER, index=1, worker_num=4)


def test_given_sizes_bound_the_local_rank() -> None:
    with pytest.raises(RoleError, match="local_rank=2, expected 0 to 1 for 2 workers on this host"):
        Role(local_rank=2, local_size=2).check_host()
    with pytest.raises(RoleError, match="node_rank=1, expected 0 to 0 for 1 hosts"):
        Role(node_rank=1, node_num=1).check_host()
    Role(local_rank=5, node_rank=3).check_host()


def test_endpoint_lists_must_match_the_counts() -> None:
    two = (("a", 1), ("b", 1))
    with pytest.raises(RoleError, match="worker_endpoints lists 2 endpoints, expected 3"):
        Role(worker_num=3, worker_endpoints=two)
    with pytest.raises(RoleError, match="server_endpoints lists 2 endpoints, expected 1"):
        Role(server_num=1, server_endpoints=two)
    with pytest.raises(RoleError, match=r"worker_endpoints lists \[::1\]:1 twice"):
        Role(worker_num=2, worker_endpoints=(("::1", 1), ("::1", 1)))


def test_local_rank_on_hosts_that_are_not_contiguous() -> None:
    endpoints = (("b", 1), ("a", 1), ("b", 2), ("a", 2))
    places = [
        Role(index=i, worker_num=4, worker_endpoints=endpoints).with_host_ranks() for i in range(4)
    ]
    assert [(p.local_rank, p.local_size) for p in places] == [(0, 2), (0, 2), (1, 2), (1, 2)]
    assert [(p.node_rank, p.address) for p in places] == [(0, "b"), (1, "a"), (0, "b"), (1, "a")]
    assert places[0].node_num == 2


def test_no_local_rank_without_a_list() -> None:
    assert Role(worker_num=2).with_host_ranks() == Role(worker_num=2)
    assert (
        Role(index=None, worker_num=1, worker_endpoints=(("a", 1),)).with_host_ranks().local_rank
        is None
    )


def test_replaced_role_is_checked_again() -> None:
    assert Role(worker_num=2).replace(index=1).index == 1
    with pytest.raises(RoleError, match="index=2"):
        Role(worker_num=2).replace(index=2)


@pytest.mark.parametrize(
    ("text", "endpoint"),
    [
        ("node1:80", ("node1", 80)),
        (" 10.0.0.1:65535 ", ("10.0.0.1", 65535)),
        ("[fd00::1]:1", ("fd00::1", 1)),
    ],
)
def test_endpoints_are_parsed(text: str, endpoint: tuple[str, int]) -> None:
    assert parse_endpoint(text, "here") == endpoint


@pytest.mark.parametrize(
    "text",
    ["", "node", "node:", ":80", "node:0", "node:65536", "node:²", "node:" + "9" * 5000, "a:b:80",
     "::1:80", "[]:80", "[node]:80", "two words:80", "http://node:80", "node:-1"],
)  # fmt: skip
def test_invalid_endpoints_are_refused(text: str) -> None:
    with pytest.raises(RoleError, match=r"here: got .*, expected host:port"):
        parse_endpoint(text, "here")


def test_list_may_end_with_a_comma() -> None:
    assert parse_endpoints("a:1, b:2,", "here") == (("a", 1), ("b", 2))
    assert parse_endpoints("", "here") == ()


@settings(deadline=None)
@given(st.one_of(st.ip_addresses().map(str), st.from_regex(r"[a-z][a-z0-9.-]*", fullmatch=True)),
       st.integers(1, 65535))  # fmt: skip
def test_endpoints_round_trip(host: str, port: int) -> None:
    assert parse_endpoint(endpoint_text((host, port)), "here") == (host, port)
