# SPDX-License-Identifier: Apache-2.0
"""The facts about one machine, found without torch."""

from __future__ import annotations

import contextlib
import os
import platform
import socket
import struct
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from fleetlight.errors import LaunchError
from fleetlight.launch.doctor.messages import ExamOptions, Facts
from fleetlight.launch.inventory import Machine, version_of
from fleetlight.launch.processes import ports
from fleetlight.roles import address

_SHARED = Path("/dev/shm")


def facts_of(
    machine: Machine, environment: Mapping[str, str], asked: ExamOptions, own: str | None = None
) -> Facts:
    """The facts about this machine; `own` is its address in the list of machines."""
    name = socket.gethostname()
    interface = machine.interface(own) if own else None
    return Facts(
        asked=asked,
        name=name,
        name_address=address.resolve(name),
        fleetlight=version_of("fleetlight"),
        torch=version_of("torch"),
        python=platform.python_version(),
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        cores=machine.cores,
        gpus=machine.gpus,
        memory=_memory(),
        shared_memory=shared_memory(_SHARED),
        files=_files(),
        threads=environment.get("OMP_NUM_THREADS"),
        interface=interface,
        mtu=mtu_of(interface),
    )


def _memory() -> int:
    with contextlib.suppress(ValueError, OSError):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return 0


def shared_memory(folder: Path) -> int | None:
    """The size of the file system for shared memory, None without one."""
    with contextlib.suppress(OSError):
        found = os.statvfs(folder)
        return found.f_frsize * found.f_blocks
    return None


def _files() -> int | None:
    with contextlib.suppress(ImportError, ValueError):
        import resource

        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        return None if limit == resource.RLIM_INFINITY else limit
    return None


def mtu_of(interface: str | None) -> int | None:
    """The largest packet size of an interface, None if unknown."""
    if not interface or sys.platform != "linux":
        return None
    import fcntl

    siocgifmtu = 0x8921  # fills a `struct ifreq`: 16 bytes of name, then an int
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        request = struct.pack("16si12x", interface.encode(), 0)
        return int(struct.unpack("16si12x", fcntl.ioctl(asked, siocgifmtu, request))[1])
    return None


class PortListeners:
    """Listens on the ports of a job on this machine while the doctor runs."""

    def __init__(self, own: str, wanted: range) -> None:
        self.taken: dict[int, str] = {}
        self._sockets = list(self._opened(own, wanted))
        self.ports = tuple(int(one.getsockname()[1]) for one in self._sockets)

    def _opened(self, own: str, wanted: range) -> Iterator[socket.socket]:
        # after them any free port, such as Gloo and NCCL choose
        for port in (*wanted, 0):
            try:
                # as the launcher checks: another job may have reserved a port without listening
                ports.Reservation(own, port).close()
                found = ports.listen(own, port)
            except (LaunchError, OverflowError) as error:
                self.taken[port] = str(error)
            else:
                if found is not None:
                    yield found

    def close(self) -> None:
        """Release the ports."""
        for one in self._sockets:
            one.close()
