# SPDX-License-Identifier: Apache-2.0
"""Selection of the dialect, and environments with several dialects."""

import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.roles.environments import MINDSPORE, OWN, PADDLE, PADDLE_SERVER, SLURM, TORCHRUN

from fleetlight.errors import RoleError
from fleetlight.roles import Kind, Role, environment, from_environment

#: worker 1 of 2, in each dialect that can express it
SAME = {
    "FLEET_*": {
        "FLEET_ROLE": "worker",
        "FLEET_INDEX": "1",
        "FLEET_WORKER_NUM": "2",
        "FLEET_MASTER": "a:1",
    },
    "torchrun": {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "b", "MASTER_PORT": "2"},
    "PADDLE_*": {"PADDLE_TRAINER_ID": "1", "PADDLE_TRAINER_ENDPOINTS": "c:3,d:4"},
    "MS_*": {
        "MS_ROLE": "MS_WORKER",
        "MS_WORKER_NUM": "2",
        "MS_SCHED_HOST": "e",
        "MS_SCHED_PORT": "5",
    },
}
NAMES = list(SAME)
VARIABLE = r"""['"]((?:[A-Z]+|FLAGS)_[A-Za-z_]+|RANK)['"]"""
PAIRS = [(a, b) for i, a in enumerate(NAMES) for b in NAMES[i + 1 :]]


def test_documentation_of_roles_names_every_variable() -> None:
    root = Path(__file__).parents[2]
    page = (root / "docs" / "roles.md").read_text(encoding="utf-8")
    sources = [*(root / "src/fleetlight/roles/dialects").glob("*.py"), Path(environment.__file__)]
    found = {name for path in sources for name in re.findall(VARIABLE, path.read_text())}
    assert len(found) > 40
    assert {name for name in found if f"`{name}`" not in page} == set()


def test_empty_environment_is_a_single_worker() -> None:
    assert from_environment({}) == Role()
    assert from_environment({"HOME": "/", "FLEET_LOG_DIR": "log"}) == Role(log_dir="log")


@pytest.mark.parametrize("env", [OWN, TORCHRUN, PADDLE, MINDSPORE, SLURM])
def test_each_dialect_is_complete_alone(env: dict[str, str]) -> None:
    assert from_environment(env).dialect.startswith(
        ("FLEET_*", "torchrun", "PADDLE_*", "MS_*", "SLURM_*")
    )


@pytest.mark.parametrize(("first", "second"), PAIRS)
def test_first_of_two_agreeing_dialects_is_used(first: str, second: str) -> None:
    role = from_environment({**SAME[second], **SAME[first]})
    assert role.dialect.startswith(first)
    assert role.master == from_environment(SAME[first]).master


@pytest.mark.parametrize(("first", "second"), PAIRS)
def test_conflicting_dialects_are_both_named(first: str, second: str) -> None:
    three = {
        "torchrun": {"WORLD_SIZE": "3"},
        "PADDLE_*": {"PADDLE_TRAINER_ENDPOINTS": "c:3,d:4,e:5"},
        "MS_*": {"MS_WORKER_NUM": "3"},
    }
    with pytest.raises(RoleError, match="two dialects disagree") as caught:
        from_environment({**SAME[first], **SAME[second], **three[second]})
    for name, count in ((first, 2), (second, 3)):
        assert f"{name}" in str(caught.value)
        assert f"has worker_num={count}" in str(caught.value)


def test_each_fact_can_conflict() -> None:
    with pytest.raises(RoleError, match=r"index=1.*index=0"):
        from_environment({**SAME["FLEET_*"], **SAME["torchrun"], "RANK": "0"})
    server = {"FLEET_ROLE": "server", "FLEET_INDEX": "0", "FLEET_SERVER_NUM": "1"}
    with pytest.raises(RoleError, match=r"kind=server.*kind=worker"):
        from_environment({**SAME["FLEET_*"], **SAME["torchrun"], **server})
    with pytest.raises(RoleError, match=r"server_num=2.*server_num=0"):
        from_environment({**SAME["FLEET_*"], **SAME["PADDLE_*"], "FLEET_SERVER_NUM": "2"})
    servers = {"PADDLE_PSERVERS_IP_PORT_LIST": "s:1"}
    with pytest.raises(RoleError, match=r"server_num=0.*server_num=1"):
        from_environment({**SAME["torchrun"], **SAME["PADDLE_*"], **servers})


def test_torchrun_variables_without_servers_are_no_conflict() -> None:
    # the environment that fleetrun sets for a worker of a job with servers
    role = from_environment({**SAME["FLEET_*"], **SAME["torchrun"], "FLEET_SERVER_NUM": "2"})
    assert role.server_num == 2


def test_second_dialect_must_be_complete_too() -> None:
    with pytest.raises(RoleError, match=r"PADDLE_\*: PADDLE_TRAINER_ID is not set"):
        from_environment(
            {**SAME["FLEET_*"], "TRAINING_ROLE": "TRAINER", "PADDLE_TRAINERS_NUM": "2"}
        )


@pytest.mark.parametrize("name", NAMES)
def test_other_dialects_override_slurm(name: str) -> None:
    assert from_environment({**SLURM, **SAME[name]}).dialect.startswith(name)


def test_torchrun_inside_a_slurm_step() -> None:
    role = from_environment({**SLURM, **TORCHRUN})
    assert (role.index, role.worker_num, role.local_rank) == (3, 4, 1)


def test_batch_script_or_shell_of_slurm_is_no_job() -> None:
    outside = {k: v for k, v in SLURM.items() if not k.startswith("SLURM_STEP")}
    assert from_environment({**outside, "SLURM_NTASKS": "5"}) == Role()
    assert from_environment({**SLURM, "SLURM_STEP_NUM_TASKS": "1"}) == Role()


@pytest.mark.parametrize("env", [{}, OWN, TORCHRUN, PADDLE, MINDSPORE, SLURM])
def test_fleetlight_settings_apply_in_every_dialect(env: dict[str, str]) -> None:
    ours = {"FLEET_DEADLINE_S": "12.5", "FLEET_HOST": "10.1.1.1", "FLEET_ERROR_FILE": "e.json"}
    role = from_environment({**env, **ours})
    assert (role.deadline_s, role.address, role.error_file) == (12.5, "10.1.1.1", "e.json")
    assert role.deadline_variable == "FLEET_DEADLINE_S"
    with pytest.raises(RoleError, match="FLEET_DEADLINE_S='0'"):
        from_environment({**env, "FLEET_DEADLINE_S": "0"})


def test_fleetlight_deadline_overrides_that_of_the_dialect() -> None:
    env = {**MINDSPORE, "MS_TOPO_TIMEOUT": "60"}
    assert from_environment(env).deadline_s == 60
    assert from_environment({**env, "FLEET_DEADLINE_S": "5"}).deadline_s == 5


def test_local_rank_outside_its_host_is_refused() -> None:
    with pytest.raises(RoleError, match="local_rank=2, expected 0 to 1 for 2"):
        from_environment({**TORCHRUN, "LOCAL_RANK": "2"})


def test_process_environment_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*OWN, *TORCHRUN, *PADDLE, *MINDSPORE):
        monkeypatch.delenv(name, raising=False)
    for name, value in SAME["torchrun"].items():
        monkeypatch.setenv(name, value)
    assert from_environment().index == 1


COMPLETE = [OWN, TORCHRUN, PADDLE, PADDLE_SERVER, MINDSPORE, SLURM]
VARIABLES = sorted(
    {name for env in COMPLETE for name in env}
    | {"FLEET_DEADLINE_S", "MS_SERVER_NUM", "MS_TOPO_TIMEOUT"}
)
LIKELY = sorted(
    {value for env in COMPLETE for value in env.values()}
    | {"0", "1", "2", "MS_SCHED", "MS_PSERVER", "server", "a:1", "²"}
)
slips = st.sampled_from(LIKELY) | st.text(max_size=8)


def role_or_none(env: dict[str, str]) -> Role | None:
    try:
        return from_environment(env)
    except RoleError:
        return None


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(st.dictionaries(st.sampled_from(VARIABLES), slips))
def test_any_environment_is_a_role_or_a_role_error(env: dict[str, str]) -> None:
    role_or_none(env)


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(st.sampled_from(COMPLETE), st.dictionaries(st.sampled_from(VARIABLES), slips, max_size=3))
def test_damaged_environment_is_a_role_or_a_role_error(
    env: dict[str, str], slips: dict[str, str]
) -> None:
    role = role_or_none({**env, **slips})
    assert role is None or role.kind is Kind.SCHEDULER or role.worker_num >= 1


@pytest.mark.parametrize(
    ("text", "resume", "must"),
    [("", False, False), ("0", False, False), ("1", True, True), ("auto", True, False)],
)
def test_resume_may_begin_where_nothing_is_saved(text: str, resume: bool, must: bool) -> None:
    role = from_environment({"FLEET_RESUME": text})
    assert (role.resume, role.must_resume) == (resume, must)


@pytest.mark.parametrize(
    ("name", "level"), [("", 20), ("debug", 10), ("INFO", 20), ("warning", 30)]
)
def test_level_of_log_lines(name: str, level: int) -> None:
    assert from_environment({"FLEET_LOG_LEVEL": name}).log_level == level


def test_unknown_level_is_refused() -> None:
    with pytest.raises(RoleError, match="FLEET_LOG_LEVEL=loud: expected one of debug, info, warn"):
        from_environment({"FLEET_LOG_LEVEL": "loud"})
