# SPDX-License-Identifier: Apache-2.0
"""Sockets as the kernel lists them, limits on their number and waits, and errors of accept."""

from __future__ import annotations

import contextlib
import errno
import os
import pathlib
import resource
import socket
import struct
from collections.abc import Iterator
from typing import NamedTuple

#: errors of accept where the process or the system can open no further connection
OUT_OF_DESCRIPTORS = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
#: how long a listener accepts nothing after such an error
ACCEPT_PAUSE_S = 0.5
#: the warning of such an error
CANNOT_ACCEPT = "cannot accept another connection: %s"

_TIMEVAL = struct.Struct("ll")
#: tcpi_bytes_acked and tcpi_bytes_received of the kernel's struct tcp_info, and where they end
_TCP_BYTES, _TCP_BYTES_END = struct.Struct("QQ"), 136


def open_sockets(process: str = "self") -> dict[int, str]:
    """The sockets of a process, by default this one, as {descriptor: `socket:[inode]`}.

    Empty without /proc. A socket that closes during the call may be missing.
    """
    folder = f"/proc/{process}/fd"
    found: dict[int, str] = {}
    with contextlib.suppress(OSError):
        for name in os.listdir(folder):
            with contextlib.suppress(OSError):
                target = os.readlink(f"{folder}/{name}")
                if target.startswith("socket:"):
                    found[int(name)] = target
    return found


class TcpEntry(NamedTuple):
    """A row of /proc/net/tcp or /proc/net/tcp6."""

    state: str
    uid: int
    inode: str


def tcp_entries(port: int) -> list[TcpEntry]:
    """The kernel's TCP sockets with this local port; empty without /proc."""
    found = []
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(OSError):
            for line in pathlib.Path(table).read_text().splitlines()[1:]:
                fields = line.split()
                if len(fields) > 9 and int(fields[1].rpartition(":")[2], 16) == port:
                    found.append(TcpEntry(state=fields[3], uid=int(fields[7]), inode=fields[9]))
    return found


def bound_waits(endpoint: socket.socket, seconds: float) -> None:
    """Let the kernel end each send and receive of a blocking socket after `seconds`."""
    limit = _TIMEVAL.pack(int(seconds), int(seconds % 1 * 1e6))
    endpoint.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
    endpoint.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)


def bytes_moved(endpoint: socket.socket) -> tuple[int, int]:
    """The bytes that the peer of a TCP socket has acknowledged, and those received from it.

    (0, 0) on systems that do not count them.
    """
    info = b""
    with contextlib.suppress(AttributeError, OSError):
        info = endpoint.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_BYTES_END)
    if len(info) < _TCP_BYTES_END:
        return 0, 0
    sent, received = _TCP_BYTES.unpack_from(info, _TCP_BYTES_END - _TCP_BYTES.size)
    return sent, received


def allow_descriptors(count: int) -> int:
    """Raise this process' limit of open descriptors to `count`, if possible; return the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= count:
        return count
    wanted = count if hard == resource.RLIM_INFINITY else min(count, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return wanted


@contextlib.contextmanager
def bounded_connections(seconds: float) -> Iterator[None]:
    """Limit the waits of connections that any library opens inside the block.

    Torch's store waits forever for a reply when its host is frozen or its cable is cut: the
    connection stays open then.
    """
    before = set(open_sockets().values())
    yield
    for fd, inode in open_sockets().items():
        if inode in before:
            continue
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as copy:
            if copy.family in (socket.AF_INET, socket.AF_INET6):
                bound_waits(copy, seconds)
