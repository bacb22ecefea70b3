# SPDX-License-Identifier: Apache-2.0
"""This machine's cores, GPUs, addresses and packages, found without torch."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import re
import shutil
import subprocess
from collections.abc import Callable, Mapping

from fleetlight.errors import ConfigError
from fleetlight.roles import address

NVIDIA_SMI_DEADLINE_S = 10.0


def version_of(package: str) -> str:
    """The installed version, read without importing the package."""
    import importlib.metadata

    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def resolve(host: str) -> str:
    """The IP address of a host name; an address is returned unchanged."""
    found = address.resolve(host)
    if found is None:
        raise ConfigError(
            f"cannot resolve host {host!r}; check its spelling, or give an IP address"
        )
    return found


def route(host: str) -> str:
    """This machine's address from which packets to `host` leave."""
    found = address.find_route(resolve(host))
    if found is None:
        raise ConfigError(
            f"no route from this machine to {host}; check the network or pass --host ADDRESS"
        )
    return found


@dataclasses.dataclass(frozen=True, kw_only=True)
class Machine:
    """The facts about a machine that a plan needs."""

    cores: int = 1
    gpus: int = 0
    #: (interface, address), loopback included
    addresses: address.Addresses = ()
    resolve: Callable[[str], str] = resolve
    route: Callable[[str], str] = route

    def owns(self, host: str) -> bool:
        """True when `host` is an address of this machine."""
        found = self.resolve(host)
        return address.is_loopback(found) or found in {own for _, own in self.addresses}

    def interface(self, own: str) -> str | None:
        """The interface that has the address `own`, None if unknown."""
        return address.interface_of(own, self.addresses)

    @property
    def outside_addresses(self) -> list[str]:
        """The addresses at which other machines may reach this one."""
        return [own for _, own in self.addresses if not address.is_loopback(own)]


def this_machine(environment: Mapping[str, str]) -> Machine:
    """The facts about the machine this runs on."""
    return Machine(cores=cores(), gpus=gpus(environment), addresses=address.own_addresses())


def cores() -> int:
    """Cores this process may use, by its affinity and its container's CPU limit."""
    if hasattr(os, "sched_getaffinity"):
        allowed = len(os.sched_getaffinity(0))
    else:
        allowed = os.cpu_count() or 1
    return max(1, min(allowed, _cpu_limit(pathlib.Path("/sys/fs/cgroup/cpu.max")) or allowed))


def _cpu_limit(file: pathlib.Path) -> int | None:
    try:
        quota, period = file.read_text().split()[:2]
        return None if quota == "max" else max(1, int(quota) // int(period))
    except (OSError, ValueError):
        return None


def gpus(environment: Mapping[str, str], root: pathlib.Path = pathlib.Path("/")) -> int:
    """The number of GPUs a child process sees."""
    present = _gpus_present(root)
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is None or not present:
        return present
    listed = [word.strip() for word in visible.split(",") if word.strip()]
    # CUDA ignores everything after the first wrong entry; -1 is the usual way to say "none".
    wrong = [n for n, word in enumerate(listed) if word.startswith("-")]
    return len(listed[: wrong[0]] if wrong else listed)


def _gpus_present(root: pathlib.Path) -> int:
    for folder, pattern in (("proc/driver/nvidia/gpus", r".+"), ("dev", r"nvidia\d+")):
        try:
            names = os.listdir(root / folder)
        except OSError:
            continue
        found = sum(1 for name in names if re.fullmatch(pattern, name))
        if found:
            return found
    return _gpus_listed()


def _gpus_listed() -> int:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return 0
    try:
        done = subprocess.run(
            [tool, "-L"], capture_output=True, text=True, timeout=NVIDIA_SMI_DEADLINE_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return 0
    return sum(1 for line in done.stdout.splitlines() if line.startswith("GPU "))
