# SPDX-License-Identifier: Apache-2.0
"""Slurm's variables."""

from __future__ import annotations

import pytest
from tests.roles.environments import SLURM

from fleetlight.errors import RoleError
from fleetlight.roles.dialects import slurm


def test_task_of_a_step() -> None:
    assert slurm.DIALECT.is_present(SLURM)
    role = slurm.DIALECT.read(SLURM)
    assert (role.index, role.worker_num) == (3, 5)
    assert (role.local_rank, role.local_size, role.node_rank, role.node_num) == (1, 2, 1, 3)
    assert role.master is not None
    assert role.master[0] == "node03"


@pytest.mark.parametrize(
    "changes",
    [
        {"SLURM_STEP_ID": ""},  # an allocation by salloc, or sbatch
        {"SLURM_STEP_ID": "4294967291"},  # the batch script
        {"SLURM_STEP_ID": "4294967290"},  # the interactive step
        {"SLURM_STEP_NUM_TASKS": "1"},
        {"SLURM_STEP_NUM_TASKS": ""},
        {"SLURM_STEP_NUM_TASKS": "²"},
    ],
)
def test_environments_that_are_no_job(changes: dict[str, str]) -> None:
    assert not slurm.DIALECT.is_present({**SLURM, **changes})


def test_tasks_share_a_port_and_steps_do_not() -> None:
    def port(**changes: str) -> int:
        master = slurm.DIALECT.read({**SLURM, **changes}).master
        assert master is not None
        return master[1]

    assert port() == port(SLURM_PROCID="0", SLURM_LOCALID="0", SLURM_NODEID="0")
    assert len({port(), port(SLURM_STEP_ID="1"), port(SLURM_JOB_ID="1235")}) == 3
    assert 1024 < port(SLURM_JOB_ID="999999999") < 32768


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("alpha", "alpha"),
        ("alpha,beta", "alpha"),
        ("node[03-05,9],login", "node03"),
        ("node[7,9]", "node7"),
        ("node-b[1-2]-ib", "node-b1-ib"),
        ("rack[2-3]n[08-10]", "rack2n08"),
    ],
)
def test_first_host_of_a_list(nodes: str, first: str) -> None:
    assert slurm.first_host(nodes) == first


def test_invalid_list_is_refused() -> None:
    with pytest.raises(RoleError, match=r"got node list '\[\]'"):
        slurm.first_host("[]")


@pytest.mark.parametrize(
    ("counts", "sizes"),
    [
        ("2(x2),1", [2, 2, 1, None]),
        ("4", [4, None]),
        ("1,3", [1, 3, None]),
        ("1(x999999999)", [1, 1]),
        ("two", [None]),
        ("", [None]),
    ],
)
def test_tasks_per_node(counts: str, sizes: list[int | None]) -> None:
    for node, size in enumerate(sizes):
        changes = {
            "SLURM_STEP_TASKS_PER_NODE": counts,
            "SLURM_NODEID": str(node),
            "SLURM_LOCALID": "0",
        }
        assert slurm.DIALECT.read({**SLURM, **changes}).local_size == size


def test_list_of_the_job_replaces_a_missing_list_of_the_step() -> None:
    role = slurm.DIALECT.read({**SLURM, "SLURM_STEP_NODELIST": ""})
    assert role.master is not None
    assert role.master[0] == "node01"


@pytest.mark.parametrize("name", ["SLURM_JOB_ID", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID"])
def test_missing_variables_are_named(name: str) -> None:
    with pytest.raises(RoleError, match=f"{name} is not set"):
        slurm.DIALECT.read({key: value for key, value in SLURM.items() if key != name})
