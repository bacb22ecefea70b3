# SPDX-License-Identifier: Apache-2.0
"""An old torch is refused at import; one newer than those tested is warned about once."""

import os
import subprocess
import sys

import pytest
import torch

from fleetlight.errors import TorchVersionError
from fleetlight.torch_compat.version import NEWEST, OLDEST, check_torch, untested_torch

pytestmark = [pytest.mark.contract, pytest.mark.slow]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("version", ["2.8.0", "2.8.0+cu128", "1.13.1"])
def test_an_old_torch_is_refused_with_advice(version: str) -> None:
    with pytest.raises(TorchVersionError) as raised:
        check_torch(version)
    expected = f"got torch {version}, expected 2.9 or newer; pip install 'torch>=2.9'"
    assert str(raised.value) == expected


@pytest.mark.sampled(4)
@pytest.mark.parametrize("version", ["2.9.0", "2.13.0+cpu", "2.16.0a0+git1234", "3.0.1"])
def test_supported_versions_are_accepted(version: str) -> None:
    check_torch(version)


def test_only_a_torch_newer_than_tested_is_reported() -> None:
    newest = ".".join(map(str, NEWEST))
    assert untested_torch(f"{newest}.1+cpu") is None
    assert untested_torch(".".join(map(str, OLDEST))) is None
    assert f"torch 99.1.0 is newer than {newest}" in (untested_torch("99.1.0") or "")


START = """
import torch
torch.__version__ = {version!r}
import fleetlight as fleet
"""


def run(
    version: str, script: str, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    source = START.format(version=version) + script
    return subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, env=env)


def test_the_first_use_of_the_api_raises_the_error() -> None:
    done = run("2.8.0", "fleet.init")
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("fleetlight.errors.TorchVersionError: got torch 2.8.0, expected 2.9")


def test_several_inits_warn_once() -> None:
    done = run("99.0.0", "fleet.init(is_collective=True)\nfrom fleetlight.fleet import lifecycle\n"
               "lifecycle._warn_of_untested_torch()")  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("torch 99.0.0 is newer than") == 1


@pytest.mark.long
def test_only_the_first_worker_warns() -> None:
    variables = {
        "FLEET_ROLE": "worker",
        "FLEET_WORKER_NUM": "2",
        "FLEET_MASTER": "127.0.0.1:1",
        "FLEET_DEADLINE_S": "1",
    }
    for index in range(2):
        # no other worker arrives
        env = {**os.environ, **variables, "FLEET_INDEX": str(index)}
        done = run("99.0.0", "fleet.init(is_collective=True)", env)
        assert done.returncode == 69
        assert ("torch 99.0.0 is newer than" in done.stderr) == (index == 0), done.stderr


def test_this_torch_is_supported() -> None:
    check_torch(torch.__version__)
