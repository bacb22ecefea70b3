# SPDX-License-Identifier: Apache-2.0
"""Memory that two processes of one host share.

The memory has no name, so no other process can open it and nothing stays after a crash. Its size is
sealed: a peer that truncates a mapped file would kill this process. A descriptor passes over a Unix
socket, to a process of the same user that sends the ticket.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import re
import secrets
import select
import socket
import struct
import time

from fleetlight.errors import PeerError

try:
    from fcntl import (
        F_ADD_SEALS,
        F_GET_SEALS,
        F_SEAL_GROW,
        F_SEAL_SEAL,
        F_SEAL_SHRINK,
        fcntl,
    )
except ImportError:  # not Linux
    IS_AVAILABLE = False
else:
    IS_AVAILABLE = hasattr(os, "memfd_create") and hasattr(socket, "SO_PEERCRED")

_TICKET_BYTES = 16
_NAME = re.compile(r"[0-9a-f]{32}")
#: process, user and group of a peer
_CREDENTIALS = struct.Struct("3i")


def new_shared_memory(size: int) -> int:
    """Create sealed memory; returns its descriptor."""
    descriptor = os.memfd_create("fleetlight", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, size)
        fcntl(descriptor, F_ADD_SEALS, F_SEAL_GROW | F_SEAL_SHRINK | F_SEAL_SEAL)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def map_shared_memory(descriptor: int, size: int) -> mmap.mmap:
    """Map memory from a peer, which must have this size and be sealed."""
    seals = fcntl(descriptor, F_GET_SEALS)
    found = os.fstat(descriptor).st_size
    if not seals & F_SEAL_SHRINK or found != size:
        raise PeerError(
            f"got {'sealed' if seals & F_SEAL_SHRINK else 'unsealed'} memory of {found} bytes, "
            f"expected sealed memory of {size} bytes"
        )
    return mmap.mmap(descriptor, size)


class MemoryOffer:
    """Passes a descriptor to one process, which learns the name and the ticket elsewhere."""

    def __init__(self) -> None:
        self.name, self.ticket = secrets.token_hex(16), secrets.token_bytes(_TICKET_BYTES)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(_address(self.name))
        self._listener.listen(4)

    def pass_to_peer(self, descriptor: int, connection: int, within_s: float) -> bool:
        """Wait for the peer and send the descriptor; False if its `connection` is readable first.

        The peer that refuses the offer says so there. Raises TimeoutError after `within_s`.
        """
        end = time.monotonic() + within_s
        poll = select.poll()
        for each in (self._listener.fileno(), connection):
            poll.register(each, select.POLLIN)
        while True:
            ready = dict(poll.poll(1000 * max(0.0, end - time.monotonic())))
            if not ready:
                raise TimeoutError(f"the peer did not take shared memory within {within_s:g} s")
            if connection in ready:
                return False
            if self._serve(descriptor, end):
                return True

    def _serve(self, descriptor: int, end: float) -> bool:
        """Send the descriptor to a caller that has the ticket."""
        caller, _ = self._listener.accept()
        with caller, contextlib.suppress(OSError):
            caller.settimeout(max(0.001, end - time.monotonic()))
            if _user(caller) == os.geteuid() and caller.recv(_TICKET_BYTES) == self.ticket:
                socket.send_fds(caller, [b"\1"], [descriptor])
                return True
        return False

    def close(self) -> None:
        """Take no further caller."""
        self._listener.close()


def take_descriptor(name: str, ticket: bytes, within_s: float) -> int:
    """Return the descriptor of a `MemoryOffer`; raise OSError or PeerError."""
    if not _NAME.fullmatch(name) or len(ticket) != _TICKET_BYTES:
        raise PeerError("the offer of shared memory is malformed")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as caller:
        caller.settimeout(within_s)
        caller.connect(_address(name))
        if _user(caller) != os.geteuid():
            raise PeerError("another user offers shared memory")
        caller.sendall(ticket)
        _, descriptors, _, _ = socket.recv_fds(caller, 1, 1)
    if not descriptors:
        raise PeerError("the offer of shared memory has ended")
    os.set_inheritable(descriptors[0], False)
    return descriptors[0]


def _address(name: str) -> bytes:
    """An abstract address: no file, and visible only on this host."""
    return b"\0fleetlight-" + name.encode()


def _user(connected: socket.socket) -> int:
    raw = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(raw)[1])
