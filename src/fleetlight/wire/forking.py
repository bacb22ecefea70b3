# SPDX-License-Identifier: Apache-2.0
"""Close the job's connections in forked children, such as those of a DataLoader.

A child that outlives its parent would otherwise keep the parent's sockets open, and the peers
would notice the parent's end only then.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator

from fleetlight.wire.descriptors import open_sockets

_inodes: set[str] = set()
_ports: set[int] = set()


@contextlib.contextmanager
def kept_from_children() -> Iterator[None]:
    """Let later forks close the sockets that are opened inside the block."""
    before = set(open_sockets().values())
    try:
        yield
    finally:
        _inodes.update(set(open_sockets().values()) - before)


def keep_from_children(endpoint: socket.socket) -> None:
    """Let later forks close this socket."""
    _inodes.add(f"socket:[{os.fstat(endpoint.fileno()).st_ino}]")


def keep_port_from_children(port: int) -> None:
    """Let later forks close the connections that arrive at this port."""
    _ports.add(port)


def _drop_in_child() -> None:
    if not _inodes and not _ports:
        return
    nothing = os.open(os.devnull, os.O_RDWR)
    for fd, inode in open_sockets().items():
        if inode in _inodes or _local_port(fd) in _ports:
            # the descriptor stays open, because the child's copy of its owner may close it
            os.dup2(nothing, fd)
    os.close(nothing)


def _local_port(fd: int) -> int | None:
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as copy:
        name = copy.getsockname()
        return name[1] if isinstance(name, tuple) else None
    return None


os.register_at_fork(after_in_child=_drop_in_child)
