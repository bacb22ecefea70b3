# SPDX-License-Identifier: Apache-2.0
"""Slurm's variables."""

import pytest
from tests.roles.environments import SLURM

from fleetlight.errors import RoleError
from fleetlight.roles.dialects import slurm
from fleetlight.roles.environment import from_environment
from fleetlight.roles.role import Kind


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


SERVED = {**SLURM, "FLEET_SERVER_NUM": "2"}


@pytest.mark.parametrize(
    ("task", "expected"),
    [
        # tasks 0 and 1 are on node 0, 2 and 3 on node 1, 4 on node 2
        ((0, 0, 0), (Kind.SERVER, 0, 0, 1, 0)),
        ((1, 0, 1), (Kind.WORKER, 0, 0, 1, 0)),
        ((2, 1, 0), (Kind.SERVER, 1, 0, 1, 1)),
        ((3, 1, 1), (Kind.WORKER, 1, 0, 1, 1)),
        ((4, 2, 0), (Kind.WORKER, 2, 0, 1, 2)),
    ],
)
def test_tasks_are_servers_and_workers(
    task: tuple[int, int, int], expected: tuple[Kind, int, int, int, int]
) -> None:
    role = slurm.DIALECT.read({**SERVED, **numbers(*task)})
    assert (role.kind, role.index, role.local_rank, role.local_size, role.node_rank) == expected
    assert (role.server_num, role.worker_num, role.node_num) == (2, 3, 3)


def numbers(task: int, node: int, local: int) -> dict[str, str]:
    names = ("SLURM_PROCID", "SLURM_NODEID", "SLURM_LOCALID")
    return dict(zip(names, map(str, (task, node, local)), strict=True))


def test_distribution_is_that_of_the_step() -> None:
    cyclic = {**SERVED, "SLURM_DISTRIBUTION": "cyclic:block"}
    # tasks 0, 1 and 2 are on three nodes, 3 and 4 on the first two
    role = slurm.DIALECT.read({**cyclic, **numbers(1, 1, 0)})
    assert (role.kind, role.index) == (Kind.SERVER, 1)
    with pytest.raises(RoleError, match=r"task 1 is task 1 of node 0.*FLEET_SERVERS=pack"):
        slurm.DIALECT.read({**cyclic, **numbers(1, 0, 1)})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"SLURM_DISTRIBUTION": "plane"}, r"SLURM_DISTRIBUTION=plane.*FLEET_SERVERS=pack"),
        ({"SLURM_STEP_TASKS_PER_NODE": ""}, "SLURM_STEP_TASKS_PER_NODE is missing"),
        ({"SLURM_STEP_TASKS_PER_NODE": "2(x9)"}, "does not fit SLURM_STEP_NUM_TASKS"),
    ],
)
def test_unknown_nodes_need_pack(changes: dict[str, str], message: str) -> None:
    with pytest.raises(RoleError, match=message):
        slurm.DIALECT.read({**SERVED, **changes})
    role = slurm.DIALECT.read({**SERVED, **changes, "FLEET_SERVERS": "pack"})
    assert (role.kind, role.index, role.local_rank) == (Kind.WORKER, 1, None)


def test_wrong_numbers_of_servers_are_refused() -> None:
    with pytest.raises(RoleError, match=r"FLEET_SERVER_NUM=5, but the step has 5 tasks.*-ntasks 6"):
        slurm.DIALECT.read({**SLURM, "FLEET_SERVER_NUM": "5"})
    with pytest.raises(RoleError, match="FLEET_SERVERS='even', expected spread"):
        slurm.DIALECT.read({**SERVED, "FLEET_SERVERS": "even"})
    with pytest.raises(RoleError, match="SLURM_PROCID=7, expected 0 to 4"):
        slurm.DIALECT.read({**SERVED, "SLURM_PROCID": "7"})


def test_job_keeps_its_name_when_slurm_starts_it_again() -> None:
    role = from_environment({**SLURM, "SLURM_RESTART_COUNT": "2"})
    assert (role.job, role.restart) == ("slurm-1234-0", 2)
    own = {"FLEET_JOB": "own", "FLEET_RESTART": "5"}
    role = from_environment({**SLURM, "SLURM_RESTART_COUNT": "2", **own})
    assert (role.job, role.restart) == ("own", 5)


@pytest.mark.parametrize(
    ("visible", "device"),
    [("", None), ("3", 0), ("0,1", 1), ("NoDevFiles", None), ("GPU-5,GPU-6", 1)],
)
def test_gpu_of_a_worker(visible: str, device: int | None) -> None:
    assert slurm.DIALECT.read({**SLURM, "CUDA_VISIBLE_DEVICES": visible}).device == device
    server = {**SERVED, **numbers(0, 0, 0), "CUDA_VISIBLE_DEVICES": visible}
    assert slurm.DIALECT.read(server).device is None
