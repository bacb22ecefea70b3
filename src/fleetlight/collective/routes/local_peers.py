# SPDX-License-Identifier: Apache-2.0
"""Connects the workers of one host with each other, for `shared_memory`."""

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
#: connecting to a neighbour takes no time, or it is not to be had
_CONNECT_S = 10.0


def shared_memory_of(group: Group) -> SharedMemory | None:
    """Shared memory of all workers, if all of them are on this host and can have it."""
    if group.alone or len(hosts_of(group.hellos)) > 1:
        return None
    peers = connected(group, range(group.size))
    if peers is None:
        return None
    return SharedMemory(group.index, [peers.get(index) for index in range(group.size)])


def connected(group: Group, partners: Collection[int]) -> dict[int, socket.socket] | None:
    """Connections to some workers of this host; None if any worker of the job cannot have its own.

    All workers of the job come here, each with its partners.
    """
    if sys.platform != "linux" or group.backend != "gloo":
        return None
    peers: dict[int, socket.socket] | None = None
    with kept_from_children():
        listener, name = _listen()
        names = group.gather_bytes(name, "meeting the neighbours")
        try:
            peers = _connect(group, listener, names, partners)
        except OSError as error:
            logger.warning("no shared memory between the workers of this host: %s", error)
        finally:
            listener.close()
    if not all(group.gather_bytes(b"" if peers is None else b"1", "meeting the neighbours")):
        return None
    assert peers is not None
    for peer in peers.values():
        peer.settimeout(None)
        bound_waits(peer, group.deadline_s)
    return peers


def _listen() -> tuple[socket.socket, bytes]:
    """A socket without a name in any folder; the name cannot be guessed."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    name = b"\0fleetlight-" + secrets.token_hex(16).encode()
    listener.bind(name)
    listener.listen(1024)
    listener.settimeout(_CONNECT_S)
    return listener, name


def _connect(
    group: Group, listener: socket.socket, names: list[bytes], partners: Collection[int]
) -> dict[int, socket.socket]:
    """A connection to each partner: to the lower ones by calling, from the higher by call."""
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
    """Only processes of the same user may call."""
    credentials = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    _, uid, _ = struct.unpack("iII", credentials)
    if uid != os.getuid():
        raise OSError(f"a process of another user ({uid}) called")
