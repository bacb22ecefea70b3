# SPDX-License-Identifier: Apache-2.0
"""Find a process again by its number and the time of its start, since numbers are reused."""

from __future__ import annotations

import contextlib
import enum
import os
import pathlib
import signal
import socket
from collections.abc import Iterator, Sequence

import msgspec

_PROC = pathlib.Path("/proc")
#: positions among the fields of /proc/PID/stat after the name of the program
_STATE, _START = 0, 19


class Presence(enum.Enum):
    """Whether a process still runs."""

    RUNNING = enum.auto()
    ENDED = enum.auto()
    #: it is on another machine or in another container, or the system does not tell
    UNKNOWN = enum.auto()


class System(msgspec.Struct, frozen=True):
    """Where the number of a process is valid: until the next boot, in one PID namespace."""

    hostname: str
    boot: str
    namespace: str


def this_system() -> System:
    """The system of this process."""
    try:
        boot = (_PROC / "sys/kernel/random/boot_id").read_text().strip()
        namespace = os.readlink(_PROC / "self/ns/pid")
    except OSError:
        boot = namespace = ""
    return System(socket.gethostname(), boot, namespace)


def start_of(pid: int) -> int | None:
    """When a process started, in ticks since the boot; None if it is not known."""
    fields = _fields(pid)
    return int(fields[_START]) if fields else None


def presence(pid: int, start: int | None, system: System) -> Presence:
    """Whether the process runs that had this number and start on a system."""
    here = this_system()
    if system == here and start is not None:
        return Presence.RUNNING if _runs(pid, start) else Presence.ENDED
    # the machine has booted since
    is_over = system.hostname == here.hostname and system.boot != here.boot
    return Presence.ENDED if is_over else Presence.UNKNOWN


def send(number: int, pid: int, start: int | None, owner: int) -> bool:
    """Send a signal to the process with this number, start and user; False if there is none."""
    # while the descriptor is open, another process may get the number, but not the signal
    with contextlib.suppress(ProcessLookupError, PermissionError), _descriptor(pid) as descriptor:
        if start is not None and _runs(pid, start) and _user(pid) == owner:
            if descriptor is None:
                os.kill(pid, number)
            else:
                signal.pidfd_send_signal(descriptor, number)
            return True
    return False


@contextlib.contextmanager
def _descriptor(pid: int) -> Iterator[int | None]:
    """A descriptor of a process; None on a kernel that has none (before Linux 5.3)."""
    try:
        descriptor = os.pidfd_open(pid)
    except (AttributeError, OSError) as error:
        if isinstance(error, ProcessLookupError):
            raise
        yield None
        return
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _runs(pid: int, start: int) -> bool:
    fields = _fields(pid)
    return bool(fields) and fields[_STATE] != "Z" and int(fields[_START]) == start


def _fields(pid: int) -> Sequence[str]:
    try:
        return (_PROC / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return ()


def _user(pid: int) -> int | None:
    """The user of a process; None if it has ended."""
    try:
        lines = (_PROC / str(pid) / "status").read_text(errors="replace").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in lines if line.startswith("Uid:")), None)
