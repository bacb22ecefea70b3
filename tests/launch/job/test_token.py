# SPDX-License-Identifier: Apache-2.0
"""The source of a job's token, and warnings for jobs without one."""

from pathlib import Path
from typing import Any

import pytest

from fleetlight.errors import ConfigError
from fleetlight.launch.inventory import Machine
from fleetlight.launch.job.options import LaunchOptions
from fleetlight.launch.job.plan import plan
from fleetlight.launch.job.spec import JobSpec
from fleetlight.launch.job.token import OPEN, OPEN_COLLECTIVE, read_token
from fleetlight.roles.secret import Secret
from fleetlight.security.certificates import make

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
    for environment in ({}, {"FLEET_TOKEN": TOKEN}):
        assert job(environment, ips=IPS).notes.count(OPEN_COLLECTIVE) == 1
    assert OPEN_COLLECTIVE not in job(nproc_per_node=2).notes
