# SPDX-License-Identifier: Apache-2.0
"""A JobSpec from LaunchOptions and a machine."""

import dataclasses
import json
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetlight.errors import ConfigError, MembershipError
from fleetlight.launch.inventory import Machine
from fleetlight.launch.job.host_selection import HostSelection, select_hosts
from fleetlight.launch.job.join_point import NAME, JoinPoint, join_point, remove
from fleetlight.launch.job.layout import JobLayout, Node, check, ordered
from fleetlight.launch.job.options import LaunchOptions
from fleetlight.launch.job.plan import plan
from fleetlight.launch.job.spec import JobSpec, RendezvousSpec
from fleetlight.roles.role import Kind
from fleetlight.roles.secret import Secret
from fleetlight.security.certificates import make
from fleetlight.strategy.features.ssl import Encryption

ADDRESSES = (("lo", "127.0.0.1"), ("eth0", "10.0.0.1"))
CPU = Machine(cores=8, addresses=ADDRESSES)
GPU = Machine(cores=8, gpus=4, addresses=ADDRESSES)


def job(machine: Machine = CPU, **flags: Any) -> JobSpec:
    return plan(LaunchOptions(script="t.py", **flags), machine)


def test_default_on_cpus_is_one_worker() -> None:
    found = job()
    assert (found.worker.count, found.server.count, found.collective) == (1, 0, True)
    assert found.machine.devices == ()


def test_default_with_gpus_is_one_worker_per_gpu() -> None:
    found = job(GPU)
    assert found.machine.devices == (0, 1, 2, 3)
    assert (found.worker.count, found.worker.resources.gpus) == (4, 1)


def test_selected_gpus() -> None:
    assert job(GPU, gpus=(1, 3)).machine.devices == (1, 3)
    assert job(GPU, gpus=(1, 3), nproc_per_node=2).worker.count == 2


def test_fewer_processes_than_gpus_use_the_first() -> None:
    assert job(GPU, nproc_per_node=2).machine.devices == (0, 1)


def test_more_processes_than_gpus_use_cpus_and_say_so() -> None:
    found = job(GPU, nproc_per_node=5)
    assert found.machine.devices == ()
    assert "5 workers need one GPU each and this machine has 4" in found.notes[0]


def test_servers_and_workers() -> None:
    found = job(server_num=2, worker_num=3)
    assert (found.server.count, found.worker.count, found.collective) == (2, 3, False)


@pytest.mark.parametrize(
    ("cores", "workers", "servers"),
    [
        (1, 1, 1),
        (2, 2, 1),
        (64, 1, 1),
        (64, 4, 1),
        (64, 5, 2),
        (64, 16, 4),
        (18, 16, 2),
        (8, 16, 1),
    ],
)
def test_server_count_follows_workers_and_cores(cores: int, workers: int, servers: int) -> None:
    found = job(Machine(cores=cores), server_num="auto", worker_num=workers)
    assert found.server.count == servers
    assert f"--server_num auto: {servers}, for {workers} workers on {cores} cores" in found.notes[0]


def test_the_number_of_servers_needs_workers_and_a_machine() -> None:
    assert job(GPU, server_num="auto", gpus=(0, 1)).server.count == 1
    for counts in ({}, {"worker_num": 0}):
        with pytest.raises(ConfigError, match="--server_num auto chooses by the workers"):
            job(server_num="auto", **counts)
    elsewhere = LaunchOptions(script="t.py", on="toy", server_num="auto", worker_num=2)
    with pytest.raises(ConfigError, match="--on toy chooses the machines; pass --server_num N"):
        plan(elsewhere, None)


def test_workers_may_join_a_job_with_servers() -> None:
    assert job(server_num=1, worker_num=2, worker_max=8).environment["FLEET_WORKER_MAX"] == "8"
    assert "FLEET_WORKER_MAX" not in job(server_num=1, worker_num=2).environment


def test_joining_workers_have_no_servers() -> None:
    known = {"FLEET_TOKEN": "0123456789abcdef"}

    def job(**flags: Any) -> JobSpec:
        return plan(LaunchOptions(script="t.py", join="10.0.0.1:6170", **flags), CPU, known)

    found = job(worker_num=4)
    assert (found.worker.count, found.server.count) == (4, 0)
    assert found.environment["FLEET_JOIN"] == "10.0.0.1:6170"
    assert job().worker.count == 1
    assert job(nproc_per_node=3).worker.count == 3
    with pytest.raises(ConfigError, match="both say how many workers join"):
        job(nproc_per_node=3, worker_num=3)
    with pytest.raises(ConfigError, match="pass --worker_num N, at least 1"):
        job(worker_num=0)
    elsewhere = LaunchOptions(script="t.py", on="toy", join="10.0.0.1:6170", worker_num=3)
    found = plan(elsewhere, None, known)
    assert found.worker.count == 3
    for machine, flags in ((None, {"on": "toy"}), (CPU, {})):
        options = LaunchOptions(script="t.py", join="10.0.0.1:6170", **flags)
        with pytest.raises(ConfigError, match="workers need the token of the job that they join"):
            plan(options, machine)


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        ({"worker_max": 8}, "which needs parameter servers; pass --server_num"),
        ({"worker_max": 1, "server_num": 1, "worker_num": 2}, "starts with 2 workers"),
        ({"worker_max": 10**8, "server_num": 1, "worker_num": 2}, "expected at most 100000"),
        ({"join": "a:1", "resume": True}, "--resume describes a job of its own"),
        ({"join": "a:1", "server_num": 1}, "--server_num describes a job of its own"),
        ({"join": "a:1", "worker_max": 3}, "--worker_max describes a job of its own"),
        ({"join": "nowhere"}, "or the log folder of a job on this machine"),
    ],
)
def test_flags_of_joins_that_fit_no_job_are_refused(flags: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        job(**flags)


def test_folder_of_checkpoints_is_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = job(nproc_per_node=1, checkpoint="ckpt", resume=True)
    assert (found.checkpoint, found.resume) == (str(tmp_path / "ckpt"), True)
    assert (job().checkpoint, job().resume) == (None, False)


def test_grace_period_is_longer_with_checkpoints() -> None:
    assert (job().grace_s, job().stop_s) == (3.0, 30.0)
    assert (job(grace_s=9.0).grace_s, job(grace_s=9.0).stop_s) == (9.0, 9.0)


def test_certificates_are_checked_and_their_path_is_absolute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(tmp_path / "certs")
    monkeypatch.chdir(tmp_path)
    assert job(server_num=1, worker_num=1, ssl="certs").ssl == Encryption(str(tmp_path / "certs"))
    assert job(server_num=1, worker_num=1).ssl is None
    (tmp_path / "certs" / "client.key").unlink()
    with pytest.raises(ConfigError, match=r"certs/client\.key is missing"):
        job(server_num=1, worker_num=1, ssl="certs")


def test_tls_flags_override_variables(tmp_path: Path) -> None:
    folder = str(tmp_path / "certs")
    make(folder)
    asked = {"server_num": 1, "worker_num": 1, "ssl": folder, "ssl_expiry_warning_days": 7}
    environment = {"FLEET_SSL_EXPIRY_WARNING_DAYS": "90"}
    assert plan(LaunchOptions(script="t.py", **asked), CPU, environment).ssl == Encryption(
        folder, 7
    )
    del asked["ssl_expiry_warning_days"]
    assert plan(LaunchOptions(script="t.py", **asked), CPU, environment).ssl == Encryption(
        folder, 90
    )
    with pytest.raises(ConfigError, match=r"WARNING_DAYS: got 'soon', expected 0 to 36500 days"):
        plan(LaunchOptions(script="t.py", **asked), CPU, {"FLEET_SSL_EXPIRY_WARNING_DAYS": "soon"})


def test_tls_settings_need_certificates() -> None:
    with pytest.raises(ConfigError, match="--ssl_expiry_warning_days needs --ssl DIR"):
        job(server_num=1, worker_num=1, ssl_expiry_warning_days=0)


@pytest.mark.parametrize("servers", [{}, {"server_num": 1, "worker_num": 1}])
def test_launchers_of_machines_use_certificates(tmp_path: Path, servers: dict[str, int]) -> None:
    folder = tmp_path / "certs"
    make(folder)
    several: dict[str, Any] = {"ips": ("10.0.0.1", "10.0.0.2"), **servers}
    encrypted = job(**several, ssl=str(folder))
    assert encrypted.ssl == Encryption(str(folder))
    assert encrypted.machine.rendezvous is not None
    assert encrypted.machine.rendezvous.ssl == encrypted.ssl
    assert not any("can join" in note for note in encrypted.notes)
    assert any("can join" in note for note in job(**several).notes)


def test_workers_of_a_server_job_use_the_named_gpus() -> None:
    found = job(GPU, server_num=1, gpus=(2, 0))
    assert found.machine.devices == (2, 0)
    assert found.worker.count == 2
    assert found.server.resources.gpus == 0


def test_server_job_without_gpus_uses_cpus_and_says_so() -> None:
    found = job(CPU, server_num=1, gpus=(0, 1))
    assert (found.worker.count, found.machine.devices) == (2, ())
    assert "no GPU; workers use CPUs" in found.notes[0]


def test_listed_processes() -> None:
    found = job(servers=("127.0.0.1:5000",), workers=("127.0.0.1:5001", "127.0.0.1:5002"))
    assert found.machine.servers == (("127.0.0.1", 5000),)
    assert found.worker.count == 2


@given(cores=st.integers(1, 256), workers=st.integers(1, 64), servers=st.integers(1, 64))
def test_each_process_gets_at_least_one_core(cores: int, workers: int, servers: int) -> None:
    found = job(Machine(cores=cores), worker_num=workers, server_num=servers)
    cpus = found.worker.resources.cpus
    assert cpus == found.server.resources.cpus >= 1
    assert cpus == 1 or cpus * (workers + servers) <= cores


def test_fixed_ports_skip_the_rendezvous_port() -> None:
    assert job(start_port=7000).machine.start_port == 7000
    assert job(ips=("10.0.0.1", "10.0.0.2"), start_port=7000).machine.start_port == 7001
    assert job(nnodes=(2, 2), master=("10.0.0.1", 7000), start_port=7000).machine.start_port == 7000


def test_interface_of_the_own_address() -> None:
    assert job().machine.interface == "lo"
    assert job(ips=("10.0.0.1", "10.0.0.2")).machine.interface == "eth0"


def test_one_of_several_machines_may_have_only_servers() -> None:
    found = job(ips=("10.0.0.1", "10.0.0.2"), server_num=2, worker_num=0)
    assert (found.server.count, found.worker.count) == (2, 0)


@pytest.mark.parametrize(
    ("machine", "flags", "message"),
    [
        (CPU, {"gpus": (0, 1)}, "this machine has no GPU; use --nproc_per_node 2"),
        (GPU, {"gpus": (3, 4)}, "numbered 0 to 3; there is no GPU 4"),
        (GPU, {"gpus": (0, 1), "nproc_per_node": 3}, "names 2 GPUs but --nproc_per_node is 3"),
        (GPU, {"gpus": (0,), "server_num": 1, "worker_num": 2}, "one GPU for each worker"),
        (CPU, {"worker_num": 2}, "pass --server_num N; .* use --nproc_per_node 2"),
        (CPU, {"server_num": 2}, "needs workers: pass --worker_num"),
        (CPU, {"server_num": 0, "worker_num": 2}, "needs servers"),
        (
            CPU,
            {"server_num": 2, "ips": ("10.0.0.1", "10.0.0.2")},
            "without workers, pass --worker_num 0",
        ),
        (
            CPU,
            {"worker_num": 2, "ips": ("10.0.0.1", "10.0.0.2")},
            "without servers, pass --server_num 0",
        ),
        (CPU, {"server_num": 1, "worker_num": 1, "nproc_per_node": 2}, "with servers use --worker"),
        (
            CPU,
            {"server_num": 0, "worker_num": 0, "ips": ("10.0.0.1", "10.0.0.2")},
            "this machine has no process",
        ),
    ],
)
def test_invalid_combinations_are_refused(
    machine: Machine, flags: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        job(machine, **flags)


def test_backend_that_chooses_machines_gets_counts_and_resources() -> None:
    found = plan(LaunchOptions(script="t.py", on="x", server_num=1, gpus=(0, 2)), None)
    assert [(role.kind, role.count) for role in found.roles] == [(Kind.SERVER, 1), (Kind.WORKER, 2)]
    assert (found.server.resources.gpus, found.worker.resources.gpus) == (0, 1)
    # the backend makes a token
    assert not any("can join" in note for note in found.notes)


def test_backend_that_chooses_machines_refuses_flags_that_name_them() -> None:
    options = LaunchOptions(script="t.py", on="x", ips=("10.0.0.1", "10.0.0.2"), start_port=7000)
    with pytest.raises(ConfigError, match=r"--on x chooses them; omit --ips and --start_port"):
        plan(options, None)


def test_command_line_of_a_process() -> None:
    assert job(arguments=("--lr", "3")).command == ("t.py", "--lr", "3")
    assert job(module=True).command == ("-m", "t.py")


# -- the order of machines, and the ranks of processes on them


A = Node(host="10.0.0.1", workers=(("10.0.0.1", 1), ("10.0.0.1", 2)), master_port=9)
B = Node(host="10.0.0.2", workers=(("10.0.0.2", 1),), servers=(("10.0.0.2", 3),), master_port=8)
C = Node(host="10.0.0.10", servers=(("10.0.0.10", 3),), master_port=7)
MEETING = RendezvousSpec(master=("10.0.0.2", 6170), min_nodes=3, max_nodes=3)


def hosts(nodes: tuple[Node, ...]) -> list[str]:
    return [node.host for node in nodes]


def test_node_round_trips() -> None:
    node = dataclasses.replace(B, agreed=(("torch", "2"),), rank=1, restart=2)
    assert Node.from_dict(json.loads(json.dumps(node.to_dict()))) == node


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=5))
def test_every_index_exists_once_and_machines_are_contiguous(counts: list[tuple[int, int]]) -> None:
    nodes = tuple(
        Node(host="h", servers=(("h", 1),) * servers, workers=(("h", 2),) * workers)
        for servers, workers in counts
    )
    layouts = [JobLayout(nodes=nodes, own=own) for own in range(len(nodes))]
    members = [member for layout in layouts for member in layout.members()]
    for kind, total in (
        (Kind.SERVER, sum(s for s, _ in counts)),
        (Kind.WORKER, sum(w for _, w in counts)),
    ):
        found = [member for member in members if member.kind is kind]
        assert [member.index for member in found] == list(range(total))
        assert all(member.of == total for member in found)


def test_local_ranks_and_devices() -> None:
    workers = JobLayout(nodes=(B, A), own=1).members(devices=(3, 5))
    assert [(w.index, w.local_rank, w.local_size, w.device) for w in workers] == [
        (1, 0, 2, 3),
        (2, 1, 2, 5),
    ]
    assert (workers[0].title, workers[0].log_name) == ("worker 1 of 3", "workerlog.1")


def test_master_is_on_the_machine_of_worker_0() -> None:
    assert JobLayout(nodes=(C, A, B)).master == ("10.0.0.1", 9)


def test_list_determines_the_order() -> None:
    listed = dataclasses.replace(MEETING, hosts=("10.0.0.10", "10.0.0.1", "10.0.0.2"))
    for nodes in permutations((A, B, C)):
        assert hosts(ordered(nodes, listed)) == ["10.0.0.10", "10.0.0.1", "10.0.0.2"]


def test_order_without_a_list_is_master_then_numeric_addresses() -> None:
    for nodes in permutations((A, B, C)):
        assert hosts(ordered(nodes, MEETING)) == ["10.0.0.2", "10.0.0.1", "10.0.0.10"]


def test_requested_ranks_determine_the_order() -> None:
    nodes = [
        dataclasses.replace(A, rank=2),
        dataclasses.replace(B, rank=0),
        dataclasses.replace(C, rank=1),
    ]
    assert hosts(ordered(nodes, MEETING)) == ["10.0.0.2", "10.0.0.10", "10.0.0.1"]


def test_duplicate_rank_is_refused() -> None:
    with pytest.raises(MembershipError, match="two machines have --rank 1"):
        ordered([dataclasses.replace(one, rank=1) for one in (A, B)], MEETING)


def test_machine_started_twice_is_refused() -> None:
    listed = dataclasses.replace(MEETING, hosts=("10.0.0.1", "10.0.0.2"))
    with pytest.raises(MembershipError, match=r"got the machines 10.0.0.1, 10.0.0.1, expected"):
        ordered((A, A), listed)


def test_fatal_difference_names_both_machines() -> None:
    one = dataclasses.replace(A, agreed=(("the torch version", "2.13"),))
    two = dataclasses.replace(B, agreed=(("the torch version", "2.12"),))
    with pytest.raises(MembershipError, match=r"is 2.13 on 10.0.0.1 but 2.12 on 10.0.0.2"):
        check([one, two])


def test_other_differences_warn() -> None:
    one = dataclasses.replace(A, noted=(("script", "aa"), ("python version", "3")))
    two = dataclasses.replace(B, noted=(("script", "bb"), ("python version", "3")))
    assert check([one, two]) == [
        "warning: the script differs between the machines (10.0.0.1: aa, 10.0.0.2: bb)"
    ]


def test_job_needs_workers_and_servers() -> None:
    with pytest.raises(MembershipError, match="no machine has a worker"):
        check([C])
    with pytest.raises(MembershipError, match="no machine has a server"):
        check([dataclasses.replace(A, collective=False)])
    assert check([dataclasses.replace(one, collective=False) for one in (A, C)]) == []


def test_late_machine_adopts_the_restart_count() -> None:
    layout = JobLayout(nodes=(dataclasses.replace(A, restart=3, failures=1), B))
    assert (layout.restart, layout.failures) == (3, 1)


# -- selection of this machine's address, and of the rendezvous endpoint


SECOND = Machine(
    addresses=(("lo", "127.0.0.1"), ("eth0", "10.0.0.2")),
    resolve=lambda host: {"first": "10.0.0.1", "second": "10.0.0.2"}.get(host, host),
    route=lambda host: "10.0.0.2",
)


def place(notes: list[str] | None = None, **flags: Any) -> HostSelection:
    return select_hosts(
        LaunchOptions(script="t.py", **flags), SECOND, [] if notes is None else notes
    )


def test_single_machine_needs_no_rendezvous() -> None:
    assert place() == HostSelection(host="127.0.0.1", rendezvous=None)


def test_single_machine_may_use_an_external_address() -> None:
    assert place(host="10.0.0.2").host == "10.0.0.2"
    assert place(ips=("10.0.0.2",)) == HostSelection(host="10.0.0.2")


def test_master_without_effect_is_reported() -> None:
    notes: list[str] = []
    assert place(notes, nnodes=(1, 1), master=("first", 1)).rendezvous is None
    assert "--master has no effect" in notes[0]


def test_own_position_in_a_list() -> None:
    notes: list[str] = []
    found = place(notes, ips=("10.0.0.1", "10.0.0.2"))
    assert found.host == "10.0.0.2"
    assert found.rendezvous is not None
    assert found.rendezvous.master == ("10.0.0.1", 6170)
    assert (found.rendezvous.rank, found.rendezvous.is_master) == (1, False)
    assert "this machine's address: 10.0.0.2" in notes[0]


def test_first_of_a_list_is_the_master() -> None:
    spec = place(ips=("second", "first"), start_port=7000).rendezvous
    assert spec is not None
    assert spec.is_master
    assert spec.master == ("10.0.0.2", 7000)
    assert spec.hosts == ("10.0.0.2", "10.0.0.1")


def test_own_address_is_that_of_the_route() -> None:
    notes: list[str] = []
    found = place(notes, nnodes=(2, 3), master=("first", 6170))
    assert found.host == "10.0.0.2"
    assert found.rendezvous is not None
    assert not found.rendezvous.is_master
    assert (found.rendezvous.min_nodes, found.rendezvous.max_nodes) == (2, 3)
    assert "from the route to the master" in notes[0]


def test_machine_with_the_master_address_serves_it() -> None:
    spec = place(nnodes=(2, 2), master=("second", 6170)).rendezvous
    assert spec is not None
    assert spec.is_master
    spec = place(nnodes=(2, 2), master=("second", 6170), rank=1).rendezvous
    assert spec is not None
    assert not spec.is_master


def test_only_listed_processes_of_this_machine_start() -> None:
    found = place(servers=("10.0.0.1:5000",), workers=("10.0.0.1:5001", "10.0.0.2:5001"))
    assert found.servers == ()
    assert found.workers == (("10.0.0.2", 5001),)
    assert found.rendezvous is not None
    # a port of the first machine that no process uses
    assert found.rendezvous.master == ("10.0.0.1", 5002)


def test_addresses_are_compared_as_a_whole() -> None:
    own = Machine(addresses=(("eth0", "10.0.0.1"),))
    options = LaunchOptions(script="t.py", servers=("10.0.0.1:1",), workers=("10.0.0.10:1",))
    assert select_hosts(options, own, []).workers == ()


def test_lists_that_name_only_this_machine() -> None:
    found = place(servers=("127.0.0.1:1",), workers=("127.0.0.1:2", "127.0.0.1:3"))
    assert found.rendezvous is None
    assert len(found.workers) == 2


def test_list_in_mixed_order_is_reported() -> None:
    notes: list[str] = []
    place(notes, servers=("10.0.0.1:1",), workers=("10.0.0.1:2", "10.0.0.2:2", "10.0.0.1:3"))
    assert any("workers are numbered machine by machine" in note for note in notes)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            {"ips": ("10.0.0.1", "10.0.0.3")},
            "none of .* is an address of this machine, which has 10.0",
        ),
        ({"ips": ("127.0.0.1", "127.0.0.2")}, "all addresses of this machine; pass --host"),
        ({"ips": ("10.0.0.2", "second")}, "lists 10.0.0.2 twice"),
        ({"ips": ("10.0.0.1", "10.0.0.2"), "host": "127.0.0.1"}, "is not among the machines"),
        ({"ips": ("10.0.0.1", "10.0.0.2"), "rank": 0}, "10.0.0.2 has rank 1"),
        ({"ips": ("10.0.0.1", "10.0.0.2"), "nnodes": (3, 3)}, "--ips lists 2 machines"),
        ({"ips": ("10.0.0.1", "10.0.0.2"), "master": ("a", 1)}, "omit --master"),
        ({"host": "10.0.0.9"}, "--host 10.0.0.9: not an address of this machine"),
        ({"nnodes": (2, 2)}, "--nnodes 2 needs --master"),
        ({"master": ("first", 1)}, "--master needs --nnodes"),
        ({"rank": 1}, "--rank needs"),
        ({"nnodes": (2, 2), "master": ("first", 1), "rank": 2}, "outside 0..1"),
        ({"servers": ("10.0.0.2:1",)}, "--servers needs --workers too"),
        ({"workers": ("10.0.0.2:1",)}, "--workers needs --servers too"),
        ({"servers": ("second:1",), "workers": ("second:2", "second:2")}, "10.0.0.2:2 twice"),
        ({"servers": ("a:1",), "workers": ("a:2",), "worker_num": 1}, "omit --worker_num"),
        ({"servers": ("a:1",), "workers": ("a:2",), "nnodes": (2, 2), "master": ("a", 1)}, "omit"),
        ({"servers": ("second",), "workers": ("second:1",)}, "expected host:port"),
    ],
)
def test_contradicting_flags_are_refused(flags: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        place(**flags)


# -- joinPoint: `--join` takes an address, or the log folder of a job on this machine


TOKEN = Secret("0123456789abcdef")


def test_a_log_folder_has_the_address_and_the_token(tmp_path: Path) -> None:
    JoinPoint("10.0.0.1:6170", TOKEN).write(tmp_path)
    assert join_point(str(tmp_path), None) == JoinPoint("10.0.0.1:6170", TOKEN)
    assert (tmp_path / NAME).stat().st_mode & 0o777 == 0o600
    other = Secret("another token 01")
    assert join_point(str(tmp_path), other).token == other


def test_the_last_job_of_a_folder_counts(tmp_path: Path) -> None:
    JoinPoint("10.0.0.1:6170").write(tmp_path)
    JoinPoint("10.0.0.1:6171").write(tmp_path)
    assert join_point(str(tmp_path), None) == JoinPoint("10.0.0.1:6171")
    remove(tmp_path)
    remove(tmp_path)
    with pytest.raises(ConfigError, match="no job that workers may join runs with this log folder"):
        join_point(str(tmp_path), None)


def test_an_address_needs_no_folder() -> None:
    assert join_point("[::1]:6170", TOKEN) == JoinPoint("[::1]:6170", TOKEN)


def test_an_empty_text_is_no_folder() -> None:
    with pytest.raises(ConfigError, match="got an empty text, expected HOST:PORT of server 0"):
        join_point("", None)


@pytest.mark.parametrize("text", ["nowhere", "10.0.0.1", "10.0.0.1:0"])
def test_other_text_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="or the log folder of a job on this machine"):
        join_point(text, None)


@pytest.mark.parametrize("data", ["", "[]", "{}", '{"server": "a:1"}'])
def test_a_damaged_file_is_named(tmp_path: Path, data: str) -> None:
    (tmp_path / NAME).write_text(data)
    with pytest.raises(ConfigError, match=f"{NAME} cannot be read"):
        join_point(str(tmp_path), None)
