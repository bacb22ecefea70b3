# SPDX-License-Identifier: Apache-2.0
"""A JobSpec from LaunchOptions and a machine."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetlight.errors import ConfigError
from fleetlight.launch.inventory import Machine
from fleetlight.launch.job.options import LaunchOptions
from fleetlight.launch.job.plan import plan
from fleetlight.launch.job.spec import JobSpec
from fleetlight.roles.role import Kind
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
def test_the_number_of_servers_follows_workers_and_cores(
    cores: int, workers: int, servers: int
) -> None:
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
def test_launchers_of_several_machines_use_certificates(
    tmp_path: Path, servers: dict[str, int]
) -> None:
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
