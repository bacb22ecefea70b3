# SPDX-License-Identifier: Apache-2.0
"""The environment of each process."""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fleetlight.errors import ConfigError, StrategyError
from fleetlight.launch.inventory import Machine
from fleetlight.launch.job import environment
from fleetlight.launch.job.environment import Run
from fleetlight.launch.job.layout import JobLayout, Node
from fleetlight.launch.job.options import LaunchOptions, from_cloud
from fleetlight.launch.job.plan import plan
from fleetlight.launch.job.preload import modules_to_preload
from fleetlight.launch.job.script import check_script
from fleetlight.launch.job.spec import (
    JobSpec,
    MachineSpec,
    RendezvousSpec,
    Resources,
    RoleSpec,
    Sinks,
)
from fleetlight.launch.job.token import OPEN, OPEN_COLLECTIVE, read_token
from fleetlight.observe.sinks.services import _KINDS
from fleetlight.roles.role import Kind
from fleetlight.roles.secret import Secret
from fleetlight.security.certificates import make
from fleetlight.strategy import DistributedStrategy, JobFacts
from fleetlight.strategy.features.sinks import SINK_KINDS
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


# -- launchOptions from the environment of a cloud launcher


CLOUD = {
    "PADDLE_TRAINERS": "10.0.0.1,10.0.0.2",
    "POD_IP": "10.0.0.2",
    "PADDLE_TRAINER_ID": "1",
    "PADDLE_PORT": "6200",
}


def test_cloud_variables_give_the_machines() -> None:
    found = from_cloud(LaunchOptions(script="t.py", use_paddlecloud=True), CLOUD)
    assert found.ips == ("10.0.0.1", "10.0.0.2")
    assert (found.host, found.rank, found.start_port) == ("10.0.0.2", 1, 6200)


def test_flags_override_cloud_variables() -> None:
    options = LaunchOptions(
        script="t.py", use_paddlecloud=True, host="10.0.0.9", start_port=1, rank=0
    )
    found = from_cloud(options, CLOUD)
    assert (found.host, found.start_port, found.rank) == ("10.0.0.9", 1, 0)


def test_cloud_variables_need_the_flag() -> None:
    assert from_cloud(LaunchOptions(script="t.py"), CLOUD) == LaunchOptions(script="t.py")


def test_missing_variables_are_named() -> None:
    with pytest.raises(ConfigError, match="needs PADDLE_TRAINERS and POD_IP"):
        from_cloud(LaunchOptions(script="t.py", use_paddlecloud=True), {})


def test_port_that_is_no_number_is_refused() -> None:
    with pytest.raises(ConfigError, match="PADDLE_PORT: got 'x'"):
        from_cloud(
            LaunchOptions(script="t.py", use_paddlecloud=True), {**CLOUD, "PADDLE_PORT": "x"}
        )


# -- which scripts and jobs may start from a template


HERE = "127.0.0.1"
ROLES: tuple[dict[str, str], ...] = ({"A": "1", "RANK": "0"}, {"A": "1", "FLEET_INDEX": "1"})


def modules(
    folder: Path, script: str, *, environments: Any = ROLES, servers: int = 0, **job: Any
) -> tuple[str, ...]:
    file = folder / "train.py"
    file.write_text(script)
    node = Node(host=HERE, workers=((HERE, 1),) * 2, servers=((HERE, 3),) * servers)
    spec = dataclasses.replace(JobSpec(script=str(file)), **job)
    run = Run(job=spec, layout=JobLayout(nodes=(node,)), log_dir="", error_dir="")
    return modules_to_preload(run, environments)


@pytest.mark.parametrize(
    "script",
    [
        "import torch",
        "import torch.nn as nn",
        "from torch import nn",
        "'''Text.'''\nfrom __future__ import annotations\nimport os\nimport torch\nimport other",
        "import numpy as np\nimport torch",
    ],
)
def test_script_that_loads_torch_first(tmp_path: Path, script: str) -> None:
    assert modules(tmp_path, script) == ("torch",)


@pytest.mark.parametrize(
    "script",
    [
        "",
        "print(1)",
        "import os\nos.environ['TORCH_LOGS'] = 'all'\nimport torch",
        "import sys\nsys.path.insert(0, 'here')\nimport torch",
        "import mine\nimport torch",
        "from . import mine\nimport torch",
        "try:\n    import torch\nexcept ImportError:\n    pass",
        "def main():\n    import torch",
        "if True:\n    import torch",
        "import torch if",
        "import torchvision",
        "\0",
    ],
)
def test_script_that_may_do_something_before(tmp_path: Path, script: str) -> None:
    assert modules(tmp_path, script) == ()


@pytest.mark.parametrize("use", ["import fleetlight as fleet", "def f():\n    import fleetlight"])
def test_script_that_uses_fleetlight(tmp_path: Path, use: str) -> None:
    script = f"import torch\nx = 1\n{use}\n"
    assert modules(tmp_path, script)[:2] == ("torch", "fleetlight.fleet.lifecycle")
    assert "numba" not in modules(tmp_path, script)
    assert "numba" in modules(tmp_path, script, servers=1)


def test_script_that_sets_variables_of_numba_loads_it_itself(tmp_path: Path) -> None:
    script = "import torch, os\nos.environ['NUMBA_NUM_THREADS'] = '1'\nimport fleetlight\n"
    assert "numba" not in modules(tmp_path, script, servers=1)


@pytest.mark.parametrize(
    "job",
    [
        {"preload": False},
        {"is_module": True},
        {"machine": MachineSpec(devices=(0, 1))},
        {
            "machine": MachineSpec(
                rendezvous=RendezvousSpec(master=(HERE, 1), min_nodes=2, max_nodes=2)
            )
        },
    ],
)
def test_job_that_starts_each_process_by_itself(tmp_path: Path, job: Any) -> None:
    assert modules(tmp_path, "import torch")
    assert modules(tmp_path, "import torch", **job) == ()


@pytest.mark.parametrize(
    "environments",
    [
        [{"RANK": "0"}],
        [{"OMP_NUM_THREADS": "1"}, {"OMP_NUM_THREADS": "2"}],
        [{"RANK": "0"}, {"RANK": "1", "TORCH_LOGS": "all"}],
    ],
)
def test_processes_that_differ_in_more_than_their_role(
    tmp_path: Path, environments: list[dict[str, str]]
) -> None:
    assert modules(tmp_path, "import torch", environments=environments) == ()


@pytest.mark.slow
def test_preloaded_modules_do_not_read_the_role(tmp_path: Path) -> None:
    """`api` registers a hook for the role of its process, so each process loads it itself."""
    load = "import importlib, sys\nfor name in sys.argv[1:]: importlib.import_module(name)\n"
    names = modules(tmp_path, "import torch, fleetlight", servers=1)
    show = "print('fleetlight.fleet.api' in sys.modules, sys.excepthook is sys.__excepthook__)"
    environment = {**os.environ, "FLEET_ERROR_FILE": str(tmp_path / "error")}
    command = [sys.executable, "-c", load + show, *names]
    found = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert found.stdout == "False True\n"


# -- the launcher finds the script or module before it starts processes


def test_script_must_be_a_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        check_script(LaunchOptions(script=str(tmp_path / "none.py")))
    with pytest.raises(ConfigError, match="is a folder"):
        check_script(LaunchOptions(script=str(tmp_path)))


@pytest.fixture
def _packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules that must not be imported, in two folders of Python's path."""
    here, there = tmp_path / "here", tmp_path / "there"
    for name in (
        "here/alone.py",
        "here/outer/__init__.py",
        "here/outer/inner/__init__.py",
        "here/outer/inner/train.py",
        "here/outer/inner/__main__.py",
        "here/spread/one.py",
        "there/spread/two.py",
        "there/alone/other.py",
    ):
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("raise AssertionError('imported')")
    monkeypatch.chdir(here)
    monkeypatch.syspath_prepend(str(there))


@pytest.mark.usefixtures("_packages")
@pytest.mark.parametrize(
    "name",
    ["alone", "outer.inner", "outer.inner.train", "spread.one", "spread.two", "json.tool", "this"],
)
def test_module_is_found_without_an_import(name: str) -> None:
    check_script(LaunchOptions(script=name, module=True))
    assert "outer" not in sys.modules


@pytest.mark.usefixtures("_packages")
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nope", r"module 'nope' does not exist \(looked in .*here and on"),
        ("nope.mod", "module 'nope.mod' does not exist"),
        ("outer.nope", "does not exist"),
        ("outer.inner.train.more", "does not exist"),
        (".inner", "does not exist"),
        ("alone.py", "omit -m to run a file"),
        ("outer", "is a package without __main__.py"),
        ("spread", "is a package without __main__.py"),
    ],
)
def test_module_that_cannot_be_run_is_refused(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_script(LaunchOptions(script=name, module=True))


# -- `--sinks`: worker 0 gets the services for metrics, fleetrun keeps the collector of events


CPU = Machine(cores=8, addresses=(("lo", "127.0.0.1"),))


def planned(sinks: str | None) -> JobSpec:
    return plan(LaunchOptions(script="t.py", sinks=sinks), CPU)


@pytest.mark.parametrize(
    ("sinks", "metrics", "events"),
    [
        (None, None, None),
        ("", "", None),
        ("tensorboard:runs,wandb", "tensorboard:runs,wandb", None),
        ("opentelemetry", "", ""),
        ("opentelemetry:http://c:4318", "", "http://c:4318"),
        ("wandb:x, opentelemetry ,mlflow:http://h:1", "wandb:x,mlflow:http://h:1", ""),
    ],
)
def test_each_service_goes_to_the_process_that_feeds_it(
    sinks: str | None, metrics: str | None, events: str | None
) -> None:
    found = planned(sinks)
    assert found.sinks == Sinks(metrics=metrics, events=events)
    assert found.environment.get("FLEET_SINKS") == metrics


@pytest.mark.parametrize(
    ("sinks", "message"),
    [
        ("wandb:x,tensorbord:runs", r"got 'tensorbord:runs'; did you mean 'tensorboard'\?"),
        ("csv", "got 'csv'; known names: mlflow, opentelemetry, python, tensorboard, wandb"),
        ("opentelemetry:collector", "expected the address of a collector, such as"),
    ],
)
def test_a_mistake_is_refused_before_a_process_starts(sinks: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        planned(sinks)


def test_an_engine_starts_processes_of_which_fleetrun_records_nothing() -> None:
    options = LaunchOptions(script="t.py", sinks="opentelemetry", on="slurm", nproc_per_node=1)
    with pytest.raises(ConfigError, match="not of a job with --on slurm; omit it"):
        plan(options, None)


def test_a_worker_sends_no_events() -> None:
    strategy = DistributedStrategy(sinks="opentelemetry")
    with pytest.raises(StrategyError, match="pass fleetrun --sinks opentelemetry"):
        strategy.check(JobFacts(worker_num=1))


def test_fleetrun_knows_the_services_that_a_worker_knows() -> None:
    assert set(SINK_KINDS) == set(_KINDS)


# -- the source of a job's token, and warnings for jobs without one


TOKEN = "3f9ac27e51d0b846"
IPS = ("10.0.0.1", "10.0.0.2")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    written = tmp_path / "token"
    written.write_text(f"{TOKEN}\n")
    written.chmod(0o600)
    return written


def job(environment: dict[str, str] | None = None, **flags: Any) -> JobSpec:
    machine = Machine(cores=8, addresses=(("lo", "127.0.0.1"), ("eth0", "10.0.0.1")))
    return plan(LaunchOptions(script="t.py", **flags), machine, environment)


def test_token_comes_from_the_environment_or_a_file(file: Path) -> None:
    assert read_token(None, {}) is None
    assert read_token(None, {"FLEET_TOKEN": TOKEN}) == Secret(TOKEN)
    assert read_token(str(file), {}) == Secret(TOKEN)
    assert read_token(str(file), {"FLEET_TOKEN": TOKEN}) == Secret(TOKEN)


def test_two_different_tokens_are_refused(file: Path) -> None:
    other = "b846d0513f9ac27e"
    with pytest.raises(ConfigError, match="have different tokens; unset FLEET_TOKEN") as caught:
        read_token(str(file), {"FLEET_TOKEN": other})
    assert TOKEN not in str(caught.value)
    assert other not in str(caught.value)


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604, 0o620])
def test_file_readable_by_others_is_refused_with_the_remedy(file: Path, mode: int) -> None:
    file.chmod(mode)
    with pytest.raises(ConfigError, match=rf"\(mode {mode:o}\); run chmod 600 {file}"):
        read_token(str(file), {})


def test_missing_file_is_named(tmp_path: Path) -> None:
    missing = tmp_path / "none"
    with pytest.raises(
        ConfigError, match=rf"{missing} cannot be read: No such file .* > {missing}"
    ):
        read_token(str(missing), {})


@pytest.mark.parametrize("text", ["", "short", "x" * 5000, "two lines that\nare long enough"])
def test_invalid_token_is_refused(file: Path, text: str) -> None:
    file.write_text(text)
    with pytest.raises(ConfigError, match=rf"--token_file {file} has .* openssl rand -hex 32"):
        read_token(str(file), {})


def test_job_has_the_given_token(file: Path) -> None:
    assert job({"FLEET_TOKEN": TOKEN}).token == Secret(TOKEN)
    assert job(token_file=str(file)).token == Secret(TOKEN)
    assert job().token is None


def test_servers_on_several_machines_without_token_or_certificates_are_open(tmp_path: Path) -> None:
    several: dict[str, Any] = {"ips": IPS, "server_num": 1, "worker_num": 1}
    assert job(**several).notes.count(OPEN) == 1
    assert OPEN not in job({"FLEET_TOKEN": TOKEN}, **several).notes
    make(tmp_path / "certs")
    assert OPEN not in job(**several, ssl=str(tmp_path / "certs")).notes
    assert OPEN not in job(server_num=1, worker_num=1).notes
    assert "anyone who reaches the ports of this job can join it" in OPEN


def test_collective_job_on_several_machines_is_open_with_a_token() -> None:
    for variables in ({}, {"FLEET_TOKEN": TOKEN}):
        assert job(variables, ips=IPS).notes.count(OPEN_COLLECTIVE) == 1
    assert OPEN_COLLECTIVE not in job(nproc_per_node=2).notes
