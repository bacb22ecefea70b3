# SPDX-License-Identifier: Apache-2.0
"""Network namespaces: which are whose, and how one is emptied and removed."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

#: what the names of all namespaces of rigs begin with
MARK = "fleetrig"
_TOOLS = ("ip", "tc")
_LIMIT_S = 60.0
_NETWORK = 0x40000000  # CLONE_NEWNET
_numbers = itertools.count()


class RigError(Exception):
    """A rig could not be made, or not be changed."""


def obstacle() -> str | None:
    """Why no rig may be made here; None where one may."""
    missing = [tool for tool in _TOOLS if shutil.which(tool) is None]
    if missing:
        return f"{' and '.join(missing)} not found: install iproute2 to make hosts on one machine"
    if os.geteuid() != 0:
        return "got an ordinary user, expected root: network namespaces need it"
    return _refused()


def _refused() -> str | None:
    """What the kernel says when it is asked for a namespace."""
    name = prefix() + "try"
    try:
        make(name)
    except RigError as error:
        return f"no network namespaces here: {error}"
    remove(name)
    return None


def command(*argv: str) -> str:
    """Run `ip` or `tc`; what it printed."""
    done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=_LIMIT_S)
    if done.returncode:
        raise RigError(f"`{' '.join(argv)}` failed: {done.stderr.strip()}")
    return done.stdout


def prefix() -> str:
    """What the names of one more rig of this process begin with."""
    return f"{MARK}-{os.getpid()}-{_started(os.getpid())}-{next(_numbers)}-"


def make(name: str) -> None:
    """Make a namespace, with a loopback as every host has one."""
    command("ip", "netns", "add", name)
    command("ip", "-n", name, "link", "set", "lo", "up")


def remove(name: str) -> None:
    """Kill what runs in a namespace, and take it away with its links; no matter if it is gone."""
    with contextlib.suppress(RigError):
        for pid in inhabitants(name):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    with contextlib.suppress(RigError):
        command("ip", "netns", "delete", name)


def enter(name: str) -> None:
    """Move this thread into a namespace, and with it the threads and processes it will start."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{name}") as space:
        if libc.setns(space.fileno(), _NETWORK):
            raise RigError(f"no way into {name}: {os.strerror(ctypes.get_errno())}")


def inhabitants(name: str) -> list[int]:
    """The ids of the processes in a namespace."""
    return [int(pid) for pid in command("ip", "netns", "pids", name).split()]


def sweep() -> list[str]:
    """Remove what processes that are no more have left; the names."""
    left = [name for name, owner in _all() if not _lives(owner)]
    for name in left:
        remove(name)
    return left


def _all() -> Iterator[tuple[str, tuple[int, int]]]:
    """Every namespace of a rig, with its owner's id and time of birth."""
    for line in command("ip", "netns", "list").splitlines():
        name = line.split()[0]
        parts = name.split("-")
        if parts[0] == MARK and len(parts) == 5:
            yield name, (int(parts[1]), int(parts[2]))


def _lives(owner: tuple[int, int]) -> bool:
    pid, started = owner
    return _started(pid) == started


def _started(pid: int) -> int | None:
    """When a process began, in ticks since boot: an id is given again, this with it is not."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    # one that is dead but not collected has no use for its namespaces
    return None if fields[0] == "Z" else int(fields[19])
