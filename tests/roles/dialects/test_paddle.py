# SPDX-License-Identifier: Apache-2.0
"""The variables of Fleet's launchers and operators."""

import pytest
from tests.roles.environments import PADDLE, PADDLE_SERVER, PADDLE_WORKER

from fleetlight.errors import RoleError
from fleetlight.roles import Kind
from fleetlight.roles.dialects import paddle


def test_collective_worker() -> None:
    role = paddle.DIALECT.read(PADDLE)
    assert (role.kind, role.index, role.worker_num, role.server_num) == (Kind.WORKER, 2, 4, 0)
    assert role.master == ("10.0.0.1", 6170)
    assert (role.address, role.device) == ("10.0.0.2", 3)


@pytest.mark.parametrize(
    ("index", "place"), [(0, (0, 2, 0, 2)), (1, (1, 2, 0, 2)), (2, (0, 2, 1, 2)), (3, (1, 2, 1, 2))]
)
def test_local_ranks_are_counted_on_each_host(index: int, place: tuple[int, ...]) -> None:
    env = {**PADDLE, "PADDLE_TRAINER_ID": str(index), "PADDLE_CURRENT_ENDPOINT": ""}
    role = paddle.DIALECT.read(env)
    assert (role.local_rank, role.local_size, role.node_rank, role.node_num) == place


def test_endpoints_alone_give_the_world_size() -> None:
    env = {k: v for k, v in PADDLE.items() if k != "PADDLE_TRAINERS_NUM"}
    assert paddle.DIALECT.read(env).worker_num == 4


def test_worker_of_a_job_with_servers() -> None:
    role = paddle.DIALECT.read(PADDLE_WORKER)
    assert (role.kind, role.index, role.worker_num, role.server_num) == (Kind.WORKER, 1, 2, 2)
    assert role.server_endpoints[1] == ("10.0.0.2", 7000)
    assert role.address == "10.0.0.9"


def test_server_finds_its_index_in_the_list() -> None:
    role = paddle.DIALECT.read(PADDLE_SERVER)
    assert (role.kind, role.index, role.worker_num, role.server_num) == (Kind.SERVER, 1, 2, 2)
    assert paddle.DIALECT.read({**PADDLE_SERVER, "POD_IP": "10.0.0.1"}).index == 0


def test_first_of_several_devices_is_used() -> None:
    assert paddle.DIALECT.read({**PADDLE, "FLAGS_selected_gpus": "6,7"}).device == 6


@pytest.mark.parametrize(
    ("env", "name"),
    [
        (PADDLE, "PADDLE_TRAINER_ID"),
        (PADDLE, "PADDLE_TRAINER_ENDPOINTS"),
        (PADDLE_WORKER, "PADDLE_TRAINERS_NUM"),
        (PADDLE_SERVER, "PADDLE_TRAINERS_NUM"),
        (PADDLE_SERVER, "PADDLE_PSERVERS_IP_PORT_LIST"),
        (PADDLE_SERVER, "POD_IP"),
        (PADDLE_SERVER, "PADDLE_PORT"),
    ],
)
def test_missing_variables_are_named(env: dict[str, str], name: str) -> None:
    with pytest.raises(RoleError, match=f"{name} is not set"):
        paddle.DIALECT.read({key: value for key, value in env.items() if key != name})


@pytest.mark.parametrize(
    ("env", "name", "value", "named"),
    [
        (PADDLE, "PADDLE_TRAINERS_NUM", "3", "PADDLE_TRAINERS_NUM=3"),
        (PADDLE, "PADDLE_TRAINER_ID", "4", "index=4"),
        (PADDLE, "PADDLE_TRAINER_ID", "two", "PADDLE_TRAINER_ID='two'"),
        (PADDLE, "PADDLE_CURRENT_ENDPOINT", "10.0.0.1:6170", "PADDLE_CURRENT_ENDPOINT"),
        (PADDLE, "PADDLE_TRAINER_ENDPOINTS", "a:1,b:1,c:1,a:1", "lists a:1 twice"),
        (PADDLE, "PADDLE_TRAINER_ENDPOINTS", "a:1,b", "PADDLE_TRAINER_ENDPOINTS: got 'b'"),
        (PADDLE, "FLAGS_selected_gpus", "all", "FLAGS_selected_gpus='all'"),
        (PADDLE, "TRAINING_ROLE", "HETER", "TRAINING_ROLE='HETER'"),
        (PADDLE_SERVER, "POD_IP", "10.0.0.3", "10.0.0.3:7000"),
        (PADDLE_SERVER, "PADDLE_PORT", "70000", "POD_IP:PADDLE_PORT"),
    ],
)
def test_wrong_values_are_refused(env: dict[str, str], name: str, value: str, named: str) -> None:
    with pytest.raises(RoleError, match=named):
        paddle.DIALECT.read({**env, name: value})


def test_variables_of_any_kubernetes_pod_are_no_job() -> None:
    assert not paddle.DIALECT.is_present({"POD_IP": "10.0.0.1", "PADDLE_PORT": "80"})
    assert not paddle.DIALECT.is_present({"PADDLE_TRAINER_ID": ""})


@pytest.mark.parametrize("name", [*PADDLE, "TRAINING_ROLE", "PADDLE_PSERVERS_IP_PORT_LIST"])
def test_each_marker_variable_selects_the_dialect(name: str) -> None:
    is_mark = name not in ("PADDLE_CURRENT_ENDPOINT", "FLAGS_selected_gpus")
    assert paddle.DIALECT.is_present({name: "1"}) == is_mark
