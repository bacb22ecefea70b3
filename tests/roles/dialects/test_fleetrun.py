# SPDX-License-Identifier: Apache-2.0
"""Fleetlight's own variables."""

import pytest
from tests.roles.environments import OWN

from fleetlight.errors import RoleError
from fleetlight.roles import Kind
from fleetlight.roles.dialects import fleetrun


def without(name: str, **changes: str) -> dict[str, str]:
    return {key: value for key, value in {**OWN, **changes}.items() if key != name}


def test_all_variables_are_read() -> None:
    role = fleetrun.DIALECT.read(OWN)
    assert (role.kind, role.index, role.worker_num, role.server_num) == (Kind.WORKER, 3, 4, 1)
    assert (role.master, role.master_is_outside) == (("10.0.0.1", 6170), False)
    assert role.worker_endpoints[2] == ("10.0.0.2", 6170)
    assert role.server_endpoints == (("10.0.0.1", 7000),)
    assert (role.local_rank, role.local_size, role.node_rank, role.node_num) == (1, 2, 1, 2)
    assert (role.address, role.device, role.restart) == ("10.0.0.2", 5, 2)


def test_minimal_set_of_variables() -> None:
    role = fleetrun.DIALECT.read(
        {"FLEET_ROLE": "worker", "FLEET_INDEX": "0", "FLEET_WORKER_NUM": "1"}
    )
    assert (role.index, role.worker_num, role.server_num, role.master) == (0, 1, 0, None)
    assert (role.local_rank, role.device, role.restart) == (None, None, 0)


def test_server_role_is_read() -> None:
    role = fleetrun.DIALECT.read({**OWN, "FLEET_ROLE": "Server", "FLEET_INDEX": "0"})
    assert role.is_server
    assert role.index == 0


@pytest.mark.parametrize("name", ["FLEET_ROLE", "FLEET_INDEX", "FLEET_WORKER_NUM", "FLEET_MASTER"])
def test_missing_variables_are_named(name: str) -> None:
    with pytest.raises(RoleError, match=f"{name} is not set"):
        fleetrun.DIALECT.read(without(name))


@pytest.mark.parametrize("name", ["FLEET_ROLE", "FLEET_INDEX", "FLEET_WORKER_NUM"])
def test_each_marker_variable_selects_the_dialect(name: str) -> None:
    assert fleetrun.DIALECT.is_present({name: "1"})
    assert not fleetrun.DIALECT.is_present({name: " "})


def test_address_alone_is_no_job() -> None:
    assert not fleetrun.DIALECT.is_present({"FLEET_HOST": "10.0.0.1", "FLEET_DEADLINE_S": "3"})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("FLEET_ROLE", "boss"),
        ("FLEET_INDEX", "-1"),
        ("FLEET_INDEX", "4"),
        ("FLEET_INDEX", "1.0"),
        ("FLEET_INDEX", "٣"),
        ("FLEET_WORKER_NUM", "0"),
        ("FLEET_WORKER_NUM", "9" * 5000),
        ("FLEET_MASTER", "10.0.0.1"),
        ("FLEET_MASTER", "10.0.0.1:0"),
        ("FLEET_SERVER_NUM", "2"),
        ("FLEET_WORKER_ENDPOINTS", "10.0.0.1:1"),
        ("FLEET_LOCAL_RANK", "one"),
    ],
)
def test_wrong_values_are_refused(name: str, value: str) -> None:
    with pytest.raises(RoleError, match=r"FLEET_"):
        fleetrun.DIALECT.read({**OWN, name: value})


def test_a_scheduler_has_no_index() -> None:
    scheduler = fleetrun.DIALECT.read(without("FLEET_INDEX", FLEET_ROLE="scheduler"))
    assert (scheduler.kind, scheduler.index) == (Kind.SCHEDULER, 0)
    assert not scheduler.master_is_outside


def test_a_scheduler_assigns_indices() -> None:
    member = fleetrun.DIALECT.read(without("FLEET_INDEX", FLEET_SCHEDULER_NUM="1"))
    assert (member.index, member.master_is_outside) == (None, True)
    # a member may bring its own
    member = fleetrun.DIALECT.read({**OWN, "FLEET_SCHEDULER_NUM": "1"})
    assert (member.index, member.master_is_outside) == (3, True)


def test_unknown_roles_are_refused() -> None:
    with pytest.raises(RoleError, match="FLEET_ROLE='cook', expected one of worker, server, sched"):
        fleetrun.DIALECT.read({**OWN, "FLEET_ROLE": "cook"})


def test_server_of_a_job_without_servers_is_refused() -> None:
    env = {"FLEET_ROLE": "server", "FLEET_INDEX": "0", "FLEET_WORKER_NUM": "1"}
    with pytest.raises(RoleError, match="server_num=0, expected at least 1"):
        fleetrun.DIALECT.read(env)
