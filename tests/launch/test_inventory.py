# SPDX-License-Identifier: Apache-2.0
"""The inventory of real and simulated machines."""

import os
import pathlib
import sys

import pytest

from fleetlight.errors import ConfigError
from fleetlight.launch import inventory
from fleetlight.launch.inventory import Machine
from fleetlight.roles import address

LINUX_ONLY = pytest.mark.skipif(sys.platform != "linux", reason="reads Linux's tables")


def test_cores_follow_the_cpu_affinity() -> None:
    assert 1 <= inventory.cores() <= (os.cpu_count() or 1)


def test_container_limit_reduces_the_cores(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "cpu.max"
    file.write_text("250000 100000\n")
    assert inventory._cpu_limit(file) == 2
    file.write_text("max 100000\n")
    assert inventory._cpu_limit(file) is None
    assert inventory._cpu_limit(tmp_path / "none") is None


@LINUX_ONLY
def test_loopback_interface_is_found() -> None:
    assert inventory.this_machine({}).interface("127.0.0.2") == "lo"


def test_gpus_are_counted_by_their_device_files(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "dev").mkdir()
    assert inventory.gpus({}, tmp_path) == 0
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / "dev" / name).touch()
    assert inventory.gpus({}, tmp_path) == 2
    (tmp_path / "proc/driver/nvidia/gpus/0000:01:00.0").mkdir(parents=True)
    assert inventory.gpus({}, tmp_path) == 1


def test_driver_tool_counts_gpus(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'GPU 0: A'\necho 'GPU 1: B'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    assert inventory.gpus({}, tmp_path) == 2


@pytest.mark.parametrize(("visible", "count"), [("", 0), ("1", 1), ("0,1", 2), ("-1", 0)])
def test_hidden_gpus_do_not_count(tmp_path: pathlib.Path, visible: str, count: int) -> None:
    (tmp_path / "dev").mkdir()
    for name in ("nvidia0", "nvidia1", "nvidia2"):
        (tmp_path / "dev" / name).touch()
    assert inventory.gpus({"CUDA_VISIBLE_DEVICES": visible}, tmp_path) == count


def test_own_addresses_are_recognized() -> None:
    own = Machine(addresses=(("lo", "127.0.0.1"), ("eth0", "10.0.0.1")))
    assert own.owns("10.0.0.1")
    assert own.owns("127.0.0.9")
    assert not own.owns("10.0.0.10")
    assert not Machine(addresses=(("eth0", "10.0.0.10"),)).owns("10.0.0.1")
    assert own.interface("10.0.0.1") == "eth0"
    assert own.interface("10.0.0.7") is None
    assert own.outside_addresses == ["10.0.0.1"]


def test_names_are_resolved() -> None:
    own = Machine(addresses=(("eth0", "10.0.0.1"),), resolve={"me": "10.0.0.1"}.__getitem__)
    assert own.owns("me")


def test_route_to_loopback_is_loopback() -> None:
    assert inventory.route("127.0.0.1") == "127.0.0.1"


def test_missing_route_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(address, "find_route", lambda host: None)
    with pytest.raises(
        ConfigError, match=r"no route from this machine to 198\.51\.100\.1; .*--host"
    ):
        inventory.route("198.51.100.1")


def test_unknown_name_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"cannot resolve host 'no\.such\.invalid'"):
        inventory.resolve("no.such.invalid")


def test_version_of_a_missing_package() -> None:
    assert inventory.version_of("no-such-package-anywhere") == "not installed"
