# SPDX-License-Identifier: Apache-2.0
"""The sockets of this process: which there are, and how long the kernel lets them wait."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections.abc import Iterator

_TIMEVAL = struct.Struct("ll")


def open_sockets(process: str = "self") -> dict[int, str]:
    """The sockets of a process, by default this one: {descriptor: `socket:[inode]`}.

    None where /proc does not tell; one that is closed meanwhile is left out.
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


def bound_waits(endpoint: socket.socket, seconds: float) -> None:
    """Let the kernel end every send and receive of a blocking socket after so long."""
    limit = _TIMEVAL.pack(int(seconds), int(seconds % 1 * 1e6))
    endpoint.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
    endpoint.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)


@contextlib.contextmanager
def bounded_connections(seconds: float) -> Iterator[None]:
    """Connections opened inside the block, by whatever library, never wait longer than that.

    Torch's store waits without end for a reply when the process that keeps it is frozen or its
    cable is cut: nobody closes the connection then.
    """
    before = set(open_sockets().values())
    yield
    for fd, inode in open_sockets().items():
        if inode in before:
            continue
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as copy:
            if copy.family in (socket.AF_INET, socket.AF_INET6):
                bound_waits(copy, seconds)
