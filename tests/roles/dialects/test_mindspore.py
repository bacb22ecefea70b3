# SPDX-License-Identifier: Apache-2.0
"""The variables of MindSpore's CPU cluster."""

import pytest
from tests.roles.environments import MINDSPORE

from fleetlight.errors import RoleError
from fleetlight.roles import Kind
from fleetlight.roles.dialects import mindspore


def test_worker_gets_its_index_from_the_scheduler() -> None:
    role = mindspore.DIALECT.read(MINDSPORE)
    assert (role.kind, role.index, role.worker_num, role.server_num) == (Kind.WORKER, None, 8, 0)
    assert (role.master, role.master_keeper) == (("127.0.0.1", 8118), "the scheduler")
    assert role.master_is_outside


def test_scheduler_serves_the_rendezvous_endpoint() -> None:
    role = mindspore.DIALECT.read({**MINDSPORE, "MS_ROLE": "MS_SCHED"})
    assert (role.kind, role.index, role.master_is_outside) == (Kind.SCHEDULER, 0, False)
    assert not role.is_worker
    assert not role.is_server


def test_server_role_is_read() -> None:
    role = mindspore.DIALECT.read({**MINDSPORE, "MS_ROLE": "MS_PSERVER", "MS_SERVER_NUM": "2"})
    assert (role.kind, role.index, role.server_num) == (Kind.SERVER, None, 2)


def test_optional_variables_are_read() -> None:
    extra = {"MS_NODE_ID": "7", "MS_WORKER_IP": "10.0.0.3", "MS_TOPO_TIMEOUT": "90"}
    role = mindspore.DIALECT.read({**MINDSPORE, **extra})
    assert (role.node_id, role.address, role.deadline_s) == ("7", "10.0.0.3", 90.0)
    assert role.deadline_variable == "MS_TOPO_TIMEOUT"


@pytest.mark.parametrize("name", MINDSPORE)
def test_missing_variables_are_named(name: str) -> None:
    with pytest.raises(RoleError, match=f"{name} is not set"):
        mindspore.DIALECT.read({key: value for key, value in MINDSPORE.items() if key != name})


@pytest.mark.parametrize(
    ("name", "value", "named"),
    [
        ("MS_ROLE", "worker", "MS_ROLE='worker'"),
        ("MS_WORKER_NUM", "0", "worker_num=0"),
        ("MS_WORKER_NUM", "many", "MS_WORKER_NUM='many'"),
        ("MS_SCHED_PORT", "80000", "MS_SCHED_HOST:MS_SCHED_PORT"),
        ("MS_SCHED_HOST", "a/b", "MS_SCHED_HOST:MS_SCHED_PORT"),
        ("MS_TOPO_TIMEOUT", "soon", "MS_TOPO_TIMEOUT='soon'"),
        ("MS_ROLE", "MS_PSERVER", "server_num=0, expected at least 1"),
    ],
)
def test_wrong_values_are_refused(name: str, value: str, named: str) -> None:
    with pytest.raises(RoleError, match=named):
        mindspore.DIALECT.read({**MINDSPORE, name: value})


@pytest.mark.parametrize("name", ["MS_ROLE", "MS_SCHED_HOST", "MS_WORKER_NUM"])
def test_each_marker_variable_selects_the_dialect(name: str) -> None:
    assert mindspore.DIALECT.is_present({name: "1"})
    assert not mindspore.DIALECT.is_present({"MS_NODE_ID": "1"})
