# SPDX-License-Identifier: Apache-2.0
"""torchrun's variables."""

import pytest
from tests.roles.environments import TORCHRUN

from fleetlight.errors import RoleError
from fleetlight.roles.dialects import torchrun


def without(name: str) -> dict[str, str]:
    return {key: value for key, value in TORCHRUN.items() if key != name}


def test_all_variables_are_read() -> None:
    role = torchrun.DIALECT.read(TORCHRUN)
    assert (role.index, role.worker_num, role.server_num) == (3, 4, 0)
    assert (role.master, role.master_keeper) == (("node1", 29500), "the launcher's store")
    assert role.master_is_outside
    assert (role.local_rank, role.local_size, role.node_rank, role.node_num) == (1, 2, 1, 2)
    assert role.restart == 1


def test_other_launchers_keep_the_store_in_rank_0() -> None:
    env = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "h", "MASTER_PORT": "1"}
    assert not torchrun.DIALECT.read(env).master_is_outside
    agent_store_off = {**env, "TORCHELASTIC_USE_AGENT_STORE": "False"}
    assert not torchrun.DIALECT.read(agent_store_off).master_is_outside


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"])
def test_missing_variables_are_named(name: str) -> None:
    with pytest.raises(RoleError, match=f"{name} is not set"):
        torchrun.DIALECT.read(without(name))


def test_single_worker_needs_no_master() -> None:
    assert torchrun.DIALECT.read({"RANK": "0", "WORLD_SIZE": "1"}).master is None
    assert (
        torchrun.DIALECT.read({"RANK": "0", "WORLD_SIZE": "1", "MASTER_PORT": "5"}).master is None
    )


@pytest.mark.parametrize("host", ["fd00::1", "[fd00::1]"])
def test_ipv6_master_may_have_no_brackets(host: str) -> None:
    assert torchrun.DIALECT.read({**TORCHRUN, "MASTER_ADDR": host}).master == ("fd00::1", 29500)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("RANK", "4"),
        ("RANK", "x"),
        ("WORLD_SIZE", "0"),
        ("MASTER_PORT", "65536"),
        ("MASTER_PORT", "0"),
        ("MASTER_ADDR", "two words"),
        ("LOCAL_RANK", "-1"),
    ],
)
def test_wrong_values_are_refused(name: str, value: str) -> None:
    with pytest.raises(RoleError, match="torchrun"):
        torchrun.DIALECT.read({**TORCHRUN, name: value})


def test_rank_selects_the_dialect() -> None:
    assert torchrun.DIALECT.is_present({"RANK": "0"})
    # variables that sbatch scripts export for their own use
    assert not torchrun.DIALECT.is_present(
        {"WORLD_SIZE": "8", "MASTER_ADDR": "h", "MASTER_PORT": "1"}
    )
