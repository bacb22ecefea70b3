# SPDX-License-Identifier: Apache-2.0
"""Selection of the dialect, and environments with several dialects."""

import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.roles.environments import MINDSPORE, OWN, PADDLE, PADDLE_SERVER, SLURM, TORCHRUN

import fleetlight as fleet
from fleetlight.errors import MembershipError, RoleError
from fleetlight.roles import (
    Kind,
    Role,
    RoleMaker,
    UserDefinedRoleMaker,
    endpoint_text,
    environment,
    from_environment,
    members,
    parse_endpoint,
    parse_endpoints,
)
from fleetlight.roles.members import MemberHello
from fleetlight.roles.placement import Distribution, ServerRule, TaskPlace, places_of

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


# -- `Role` and endpoints


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


# -- membership: missing members, mismatches and assigned indices


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


# -- which tasks of an engine are servers, and which are workers


def short(place: TaskPlace) -> str:
    return f"{place.kind.value[0]}{place.index}@{place.node_rank}"


@pytest.mark.parametrize(
    ("tasks", "distribution", "servers", "rule", "expected"),
    [
        ([2, 2], "block", 2, "spread", "s0@0 w0@0 s1@1 w1@1"),
        ([2, 2], "cyclic", 2, "spread", "s0@0 s1@1 w0@0 w1@1"),
        ([2, 2], "block", 2, "pack", "s0@0 s1@0 w0@1 w1@1"),
        ([2, 2], "cyclic", 2, "pack", "s0@0 s1@1 w0@0 w1@1"),
        ([3, 1, 1, 1], "block", 2, "spread", "s0@0 w0@0 w1@0 s1@1 w2@2 w3@3"),
        # a node with more tasks gets what the others have no tasks for
        ([4, 1], "block", 3, "spread", "s0@0 s1@0 w0@0 w1@0 s2@1"),
        ([2, 2], "block", 0, "spread", "w0@0 w1@0 w2@1 w3@1"),
    ],
)
def test_examples(
    tasks: list[int], distribution: Distribution, servers: int, rule: ServerRule, expected: str
) -> None:
    assert " ".join(map(short, places_of(tasks, distribution, servers, rule))) == expected


@given(
    tasks=st.lists(st.integers(1, 6), min_size=1, max_size=8),
    distribution=st.sampled_from(["block", "cyclic"]),
    rule=st.sampled_from(["spread", "pack"]),
    data=st.data(),
)
def test_properties(
    tasks: list[int], distribution: Distribution, rule: ServerRule, data: st.DataObject
) -> None:
    servers = data.draw(st.integers(0, sum(tasks) - 1))
    places = places_of(tasks, distribution, servers, rule)
    for kind, count in ((Kind.SERVER, servers), (Kind.WORKER, sum(tasks) - servers)):
        assert [place.index for place in places if place.kind is kind] == list(range(count))
    if servers:
        assert places[0].kind is Kind.SERVER
        assert (places[0].index, places[0].node_rank) == (0, 0)
    for node, count in enumerate(tasks):
        here = [place for place in places if place.node_rank == node]
        assert [place.local_task for place in here] == list(range(count))
        for kind in Kind:
            ranks = [(one.local_rank, one.local_size) for one in here if one.kind is kind]
            assert ranks == [(n, len(ranks)) for n in range(len(ranks))]
        # servers are the first tasks of a node
        kinds = [place.kind is Kind.WORKER for place in here]
        assert kinds == sorted(kinds) or rule == "pack"
    assert {place.node_num for place in places} == {len(tasks)}


@given(st.lists(st.integers(1, 6), min_size=1, max_size=8), st.data())
def test_spread_servers_are_even(tasks: list[int], data: st.DataObject) -> None:
    places = places_of(tasks, "block", data.draw(st.integers(1, sum(tasks))), "spread")
    here = [
        sum(place.kind is Kind.SERVER and place.node_rank == node for place in places)
        for node in range(len(tasks))
    ]
    for node, count in enumerate(here):
        # no node has two more than another that has a task left
        assert all(count <= other + 1 or other == tasks[n] for n, other in enumerate(here)), node


def test_many_tasks_take_no_time() -> None:
    assert len(places_of([100] * 500, "cyclic", 5000, "spread")) == 50_000


# -- role makers


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


def test_makers_refuse_invalid_roles() -> None:
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
