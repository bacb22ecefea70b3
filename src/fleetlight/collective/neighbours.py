# SPDX-License-Identifier: Apache-2.0
"""Connects the workers of one host with each other, for `shared_memory`."""

from __future__ import annotations

import os
import secrets
import socket
import struct
import sys

from fleetlight.collective.group import Group
from fleetlight.collective.shared_memory import SharedMemory
from fleetlight.observe.log import logger
from fleetlight.sockets.descriptors import bound_waits
from fleetlight.sockets.forking import kept_from_children

_HELLO = struct.Struct("<I")
#: connecting to a neighbour takes no time, or it is not to be had
_CONNECT_S = 10.0


def shared_memory_of(group: Group) -> SharedMemory | None:
    """Shared memory of all workers, if all of them are on this host and can have it."""
    if group.alone or not _possible(group):
        return None
    sockets: list[socket.socket | None] | None = None
    with kept_from_children():
        listener, name = _listen()
        names = group.gather_bytes(name, "meeting the neighbours")
        try:
            sockets = _connect(group, listener, names)
        except OSError as error:
            logger.warning("no shared memory between the workers of this host: %s", error)
        finally:
            listener.close()
    if not all(group.gather_bytes(b"" if sockets is None else b"1", "meeting the neighbours")):
        return None
    assert sockets is not None
    for peer in filter(None, sockets):
        peer.settimeout(None)
        bound_waits(peer, group.deadline_s)
    return SharedMemory(group.index, sockets)


def _possible(group: Group) -> bool:
    """Linux, tensors in main memory, and one host: decided alike by every worker."""
    one_host = len({(hello.address, hello.hostname) for hello in group.hellos.values()}) == 1
    return sys.platform == "linux" and group.backend == "gloo" and one_host


def _listen() -> tuple[socket.socket, bytes]:
    """A socket without a name in any folder; the name cannot be guessed."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    name = b"\0fleetlight-" + secrets.token_hex(16).encode()
    listener.bind(name)
    listener.listen(1024)
    listener.settimeout(_CONNECT_S)
    return listener, name


def _connect(
    group: Group, listener: socket.socket, names: list[bytes]
) -> list[socket.socket | None]:
    """A connection to each other worker: to the lower ones by calling, from the higher by call."""
    peers: list[socket.socket | None] = [None] * group.size
    for index in range(group.index):
        peer = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        peer.settimeout(_CONNECT_S)
        peer.connect(names[index])
        peer.send(_HELLO.pack(group.index))
        peers[index] = peer
    for _ in range(group.index + 1, group.size):
        peer, _ = listener.accept()
        peer.settimeout(_CONNECT_S)
        _check_owner(peer)
        (index,) = _HELLO.unpack(peer.recv(_HELLO.size))
        peers[index] = peer
    return peers


def _check_owner(peer: socket.socket) -> None:
    """Only processes of the same user may call."""
    credentials = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    _, uid, _ = struct.unpack("iII", credentials)
    if uid != os.getuid():
        raise OSError(f"a process of another user ({uid}) called")
