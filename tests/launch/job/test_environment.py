# SPDX-License-Identifier: Apache-2.0
"""The environment of each process."""

import dataclasses
from pathlib import Path

import pytest

from fleetlight.launch.job import environment
from fleetlight.launch.job.environment import Run
from fleetlight.launch.job.layout import JobLayout, Node
from fleetlight.launch.job.spec import JobSpec, MachineSpec, RendezvousSpec, Resources, RoleSpec
from fleetlight.roles.role import Kind
from fleetlight.roles.secret import Secret
from fleetlight.strategy.features.ssl import Encryption

NODE = Node(
    host="10.0.0.1",
    workers=(("10.0.0.1", 1), ("10.0.0.1", 2)),
    servers=(("10.0.0.1", 3),),
    master_port=4,
)
JOB = JobSpec(
    script="t.py",
    collective=False,
    worker=RoleSpec(kind=Kind.WORKER, count=2, resources=Resources(cpus=3)),
    server=RoleSpec(kind=Kind.SERVER, count=1, resources=Resources(cpus=3)),
    machine=MachineSpec(interface="eth0", devices=(2, 5)),
)
RUN = Run(
    job=JOB, job_id="7c", layout=JobLayout(nodes=(NODE,)), log_dir="/l", error_dir="/e", restart=1
)
SERVER, WORKER_0, WORKER_1 = RUN.layout.members(JOB.machine.devices)


def test_environment_of_a_worker() -> None:
    assert environment.member_environment(RUN, WORKER_1, {}) == {
        "OMP_NUM_THREADS": "3",
        "PYTHONUNBUFFERED": "1",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "FLEET_ROLE": "worker",
        "FLEET_INDEX": "1",
        "FLEET_WORKER_NUM": "2",
        "FLEET_SERVER_NUM": "1",
        "FLEET_MASTER": "10.0.0.1:4",
        "FLEET_WORKER_ENDPOINTS": "10.0.0.1:1,10.0.0.1:2",
        "FLEET_SERVER_ENDPOINTS": "10.0.0.1:3",
        "FLEET_LOCAL_RANK": "1",
        "FLEET_LOCAL_SIZE": "2",
        "FLEET_NODE_RANK": "0",
        "FLEET_NODE_NUM": "1",
        "FLEET_HOST": "10.0.0.1",
        "FLEET_DEVICE": "5",
        "FLEET_RESTART": "1",
        "FLEET_ERROR_FILE": "/e/workerlog.1.1.json",
        "FLEET_LOG_DIR": "/l",
        "FLEET_JOB": "7c",
        "FLEET_MAX_RESTARTS": "0",
        "RANK": "1",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "4",
        "FLAGS_selected_gpus": "5",
    }


def test_processes_get_the_token_and_output_hides_it() -> None:
    job = dataclasses.replace(JOB, token=Secret("3f9ac27e51d0b846"))
    run = dataclasses.replace(RUN, job=job)
    outside = {"FLEET_TOKEN": "of whoever started fleetrun"}
    for member in (SERVER, WORKER_0):
        assert (
            environment.member_environment(run, member, outside)["FLEET_TOKEN"]
            == "3f9ac27e51d0b846"
        )
        assert "FLEET_TOKEN" not in environment.identity(run, member)
        assert "FLEET_TOKEN" not in environment.member_environment(RUN, member, {})
    shown = [repr(run), str(job), *environment.remarks(job, outside)]
    assert not [text for text in shown if "3f9ac27e51d0b846" in text]


def test_server_has_no_torch_rank_and_no_device() -> None:
    found = environment.member_environment(RUN, SERVER, {})
    assert (found["FLEET_ROLE"], found["FLEET_INDEX"]) == ("server", "0")
    assert not {"RANK", "WORLD_SIZE", "MASTER_ADDR", "FLEET_DEVICE"} & set(found)


@pytest.mark.parametrize(
    "name",
    [
        "http_proxy",
        "HTTPS_PROXY",
        "all_proxy",
        "No_Proxy",
        "PADDLE_TRAINER_ID",
        "TRAINING_ROLE",
        "POD_IP",
        "MS_ROLE",
        "MS_SCHED_HOST",
        "FLEET_DEVICE",
        "FLEET_SCHEDULER_NUM",
        "RANK",
        "MASTER_ADDR",
        "TORCHELASTIC_RUN_ID",
        "FLAGS_selected_gpus",
    ],
)
def test_stale_variables_are_dropped(name: str) -> None:
    assert name not in environment.member_environment(RUN, SERVER, {name: "stale"})


@pytest.mark.parametrize(
    "name",
    [
        "NCCL_DEBUG",
        "FLAGS_fuse_parameter_memory_size",
        "PATH",
        "SLURM_JOB_ID",
        "MS_TOKEN",
        "PADDLE_ELASTIC_NP",
    ],
)
def test_other_variables_pass_through(name: str) -> None:
    assert environment.member_environment(RUN, SERVER, {name: "kept"})[name] == "kept"


def test_user_variables_override_defaults() -> None:
    outside = {"OMP_NUM_THREADS": "7", "PYTHONUNBUFFERED": "0", "TORCH_CPP_LOG_LEVEL": "INFO"}
    found = environment.member_environment(RUN, WORKER_0, outside)
    assert {name: found[name] for name in outside} == outside


def test_several_machines_get_the_network_interface() -> None:
    spec = RendezvousSpec(master=("10.0.0.1", 6170), min_nodes=2, max_nodes=2)
    machine = dataclasses.replace(JOB.machine, rendezvous=spec)
    run = dataclasses.replace(RUN, job=dataclasses.replace(JOB, machine=machine))
    found = environment.member_environment(run, WORKER_0, {"NCCL_SOCKET_IFNAME": "ib0"})
    assert (found["GLOO_SOCKET_IFNAME"], found["NCCL_SOCKET_IFNAME"]) == ("eth0", "ib0")
    lines = environment.remarks(run.job, {"NCCL_SOCKET_IFNAME": "ib0", "OMP_NUM_THREADS": "1"})
    assert lines == ["GLOO_SOCKET_IFNAME=eth0: the interface of 127.0.0.1"]


def test_each_default_is_reported() -> None:
    first, second = environment.remarks(JOB, {"https_proxy": "x"})
    assert first.startswith("OMP_NUM_THREADS=3: the cores of this machine shared by 3 processes")
    assert second == "not passed on: https_proxy (processes connect to each other directly)"


def test_only_identity_is_shown_never_secrets() -> None:
    assert all(name.startswith("FLEET_") for name in environment.identity(RUN, WORKER_0))


def test_folder_of_certificates_is_passed_on() -> None:
    assert "FLEET_SSL" not in environment.member_environment(RUN, WORKER_0, {})
    assert environment.member_environment(RUN, WORKER_0, {"FLEET_SSL": "/a"})["FLEET_SSL"] == "/a"
    run = dataclasses.replace(RUN, job=dataclasses.replace(JOB, ssl=Encryption("/certs")))
    for member in (SERVER, WORKER_0):
        found = environment.member_environment(run, member, {"FLEET_SSL": "/a"})
        assert found["FLEET_SSL"] == "/certs"
    assert environment.identity(run, WORKER_0)["FLEET_SSL"] == "/certs"


def test_tls_settings_reach_processes_as_parsed() -> None:
    outside = {"FLEET_SSL_EXPIRY_WARNING_DAYS": "60"}
    # a script may name the folder itself
    assert environment.member_environment(RUN, WORKER_0, outside).items() >= outside.items()
    plain = dataclasses.replace(RUN, job=dataclasses.replace(JOB, ssl=Encryption("/certs")))
    assert not outside.keys() & environment.member_environment(plain, WORKER_0, outside).keys()
    asked = Encryption("/certs", 7)
    found = environment.identity(
        dataclasses.replace(RUN, job=dataclasses.replace(JOB, ssl=asked)), WORKER_0
    )
    assert found["FLEET_SSL_EXPIRY_WARNING_DAYS"] == "7"


def test_password_file_is_passed_as_an_absolute_path() -> None:
    found = environment.member_environment(RUN, WORKER_0, {"FLEET_SSL_PASSWORD_FILE": "secret"})
    assert found["FLEET_SSL_PASSWORD_FILE"] == str(Path("secret").absolute())
    assert "FLEET_SSL_PASSWORD_FILE" not in environment.member_environment(RUN, WORKER_0, {})
    assert "secret" not in str(environment.identity(RUN, WORKER_0))


def test_folder_of_checkpoints_is_passed_on() -> None:
    names = {"FLEET_CHECKPOINT", "FLEET_RESUME"}
    assert not names & set(environment.member_environment(RUN, WORKER_0, {}))
    outside = {"FLEET_CHECKPOINT": "a", "FLEET_RESUME": "0"}
    # the launcher's own environment may set it
    assert environment.member_environment(RUN, WORKER_0, outside).items() >= outside.items()
    run = dataclasses.replace(RUN, job=dataclasses.replace(JOB, checkpoint="/c", resume=True))
    for member in (SERVER, WORKER_0):
        found = environment.member_environment(run, member, outside)
        assert (found["FLEET_CHECKPOINT"], found["FLEET_RESUME"]) == ("/c", "1")


def test_ipv6_endpoints_have_brackets() -> None:
    assert environment.joined([("::1", 2), ("a", 3)]) == "[::1]:2,a:3"


def test_flags_about_waits_and_messages_reach_processes() -> None:
    job = dataclasses.replace(JOB, process_deadline_s=7.5, log_level="warning")
    found = environment.member_environment(
        dataclasses.replace(RUN, job=job), WORKER_0, {"FLEET_DEADLINE_S": "9"}
    )
    assert (found["FLEET_DEADLINE_S"], found["FLEET_LOG_LEVEL"]) == ("7.5", "warning")
    kept = environment.member_environment(RUN, WORKER_0, {"FLEET_DEADLINE_S": "9"})
    assert kept["FLEET_DEADLINE_S"] == "9"
    assert "FLEET_LOG_LEVEL" not in kept
