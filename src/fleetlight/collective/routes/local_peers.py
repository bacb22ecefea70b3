# SPDX-License-Identifier: Apache-2.0
"""Connections between the workers of one host, for `shared_memory`."""

from __future__ import annotations

import os
import secrets
import socket
import struct
import sys
from collections.abc import Collection

from fleetlight.collective.group import Group
from fleetlight.collective.routes.levels import hosts_of
from fleetlight.collective.routes.shared_memory import SharedMemory
from fleetlight.observe.log import logger
from fleetlight.wire.descriptors import bound_waits
from fleetlight.wire.forking import kept_from_children

_HELLO = struct.Struct("<I")
#: a connection on one host succeeds quickly or not at all
_CONNECT_S = 10.0
_OPERATION = "connecting the workers of a host"


def shared_memory_of(group: Group) -> SharedMemory | None:
    """Shared memory of all workers; None unless all of them are on this host and can have it."""
    if group.alone or len(hosts_of(group.hellos)) > 1:
        return None
    peers = connected(group, range(group.size))
    if peers is None:
        return None
    return SharedMemory(group.index, [peers.get(index) for index in range(group.size)])


def connected(group: Group, partners: Collection[int]) -> dict[int, socket.socket] | None:
    """Connect to some workers of this host; None where any worker of the job cannot.

    All workers of the job call it, each with its partners.
    """
    if sys.platform != "linux" or group.backend != "gloo":
        return None
    peers: dict[int, socket.socket] | None = None
    with kept_from_children():
        listener, name = _listen()
        names = group.gather_bytes(name, _OPERATION)
        try:
            peers = _connect(group, listener, names, partners)
        except OSError as error:
            logger.warning("no shared memory between the workers of this host: %s", error)
        finally:
            listener.close()
    if not all(group.gather_bytes(b"" if peers is None else b"1", _OPERATION)):
        return None
    assert peers is not None
    for peer in peers.values():
        peer.settimeout(None)
        bound_waits(peer, group.deadline_s)
    return peers


def _listen() -> tuple[socket.socket, bytes]:
    """An abstract socket with a name that cannot be guessed."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    name = b"\0fleetlight-" + secrets.token_hex(16).encode()
    listener.bind(name)
    listener.listen(1024)
    listener.settimeout(_CONNECT_S)
    return listener, name


def _connect(
    group: Group, listener: socket.socket, names: list[bytes], partners: Collection[int]
) -> dict[int, socket.socket]:
    """Connect to partners of lower index, and accept those of higher index."""
    peers: dict[int, socket.socket] = {}
    for index in sorted(index for index in partners if index < group.index):
        peer = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        peer.settimeout(_CONNECT_S)
        peer.connect(names[index])
        peer.send(_HELLO.pack(group.index))
        peers[index] = peer
    for _ in range(sum(index > group.index for index in partners)):
        peer, _ = listener.accept()
        peer.settimeout(_CONNECT_S)
        _check_owner(peer)
        (index,) = _HELLO.unpack(peer.recv(_HELLO.size))
        peers[index] = peer
    return peers


def _check_owner(peer: socket.socket) -> None:
    """Refuse connections from processes of other users."""
    credentials = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    _, uid, _ = struct.unpack("iII", credentials)
    if uid != os.getuid():
        raise OSError(f"a process of another user ({uid}) called")
