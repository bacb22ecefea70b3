# SPDX-License-Identifier: Apache-2.0
"""Role makers."""

import pytest

import fleetlight as fleet
from fleetlight.errors import RoleError
from fleetlight.roles import Kind, Role, RoleMaker, UserDefinedRoleMaker

WORKERS = ["10.0.0.1:6170", "10.0.0.1:6171", "10.0.0.2:6170"]
SERVERS = ["10.0.0.3:7000"]


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FLEET_DEADLINE_S", "FLEET_HOST", "FLEET_ERROR_FILE"):
        monkeypatch.delenv(name, raising=False)


def test_environment_is_read() -> None:
    env = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "h", "MASTER_PORT": "1"}
    maker = RoleMaker(is_collective=True, env=env)
    assert (maker.is_collective, maker.role.index) == (True, 1)
    assert RoleMaker(env={}).role == Role()


def test_paddle_name_is_the_same_class() -> None:
    assert fleet.PaddleCloudRoleMaker is fleet.RoleMaker is RoleMaker
    assert fleet.UserDefinedRoleMaker is UserDefinedRoleMaker


def test_user_defined_worker() -> None:
    role = UserDefinedRoleMaker(True, current_id=1, worker_endpoints=WORKERS, device=4).role
    assert (role.index, role.worker_num, role.master) == (1, 3, ("10.0.0.1", 6170))
    assert (role.local_rank, role.local_size, role.node_rank, role.node_num) == (1, 2, 0, 2)
    assert (role.address, role.device, role.dialect) == ("10.0.0.1", 4, "UserDefinedRoleMaker")


def test_paddle_arguments_and_names() -> None:
    maker = UserDefinedRoleMaker(
        False, True, role=fleet.Role.SERVER, server_endpoints=SERVERS, worker_num=2
    )
    assert maker.role.is_server
    assert "init_gloo=True) has no effect" in maker.remarks[0]
    assert UserDefinedRoleMaker(init_gloo=False, role=fleet.Role.WORKER).remarks == ()
    with pytest.raises(TypeError, match="did you mean 'current_id'"):
        UserDefinedRoleMaker(curent_id=1)  # type: ignore[call-arg]


@pytest.mark.parametrize("kind", [Kind.SERVER, "server", "SERVER"])
def test_user_defined_server(kind: Kind | str) -> None:
    role = UserDefinedRoleMaker(
        role=kind, current_id=0, worker_endpoints=WORKERS, server_endpoints=SERVERS
    ).role
    assert (role.kind, role.index, role.worker_num, role.server_num) == (Kind.SERVER, 0, 3, 1)
    assert role.local_rank is None


def test_master_replaces_endpoints() -> None:
    role = UserDefinedRoleMaker(current_id=1, worker_num=2, master="h:5").role
    assert (role.worker_num, role.master, role.local_rank) == (2, ("h", 5), None)
    assert UserDefinedRoleMaker(worker_endpoints=WORKERS, master="h:5").role.master == ("h", 5)


def test_default_is_one_worker() -> None:
    assert UserDefinedRoleMaker().role.worker_num == 1


def test_invalid_roles_are_refused() -> None:
    with pytest.raises(RoleError, match="index=3"):
        UserDefinedRoleMaker(current_id=3, worker_endpoints=WORKERS)
    with pytest.raises(RoleError, match="index=-1"):
        UserDefinedRoleMaker(current_id=-1, worker_endpoints=WORKERS)
    with pytest.raises(RoleError, match="worker_num=2, but worker_endpoints lists 3"):
        UserDefinedRoleMaker(worker_num=2, worker_endpoints=WORKERS)
    with pytest.raises(RoleError, match="role='boss', expected worker"):
        UserDefinedRoleMaker(role="boss")
    with pytest.raises(RoleError, match="worker_endpoints: got 'node1'"):
        UserDefinedRoleMaker(worker_endpoints=["node1"])
    with pytest.raises(RoleError, match="got the string 'a:1,b:1', expected a list"):
        UserDefinedRoleMaker(worker_endpoints="a:1,b:1")


def test_settings_of_the_launcher_apply_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLEET_DEADLINE_S", "7")
    monkeypatch.setenv("FLEET_HOST", "10.9.9.9")
    monkeypatch.setenv("FLEET_ERROR_FILE", "/tmp/error.json")
    role = UserDefinedRoleMaker(worker_endpoints=WORKERS).role
    assert (role.deadline_s, role.address, role.error_file) == (7, "10.9.9.9", "/tmp/error.json")
