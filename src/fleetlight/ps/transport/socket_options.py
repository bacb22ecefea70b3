# SPDX-License-Identifier: Apache-2.0
"""How the sockets of a job are set up."""

from __future__ import annotations

import contextlib
import socket

#: a peer whose machine has vanished is noticed after about a minute, even when nothing is sent
_KEEPALIVE = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3}
#: BBR, the default of some systems, is made for long roads: on the loopback it takes 2.4 times
#: the CPU time per byte
_LOOPBACK_CONGESTION = b"reno"


def family(host: str) -> socket.AddressFamily:
    """The family of an address; names are taken as IPv4 until they are resolved."""
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def prepare(connected: socket.socket) -> None:
    """Set up a socket that has just been connected, before anything is sent."""
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, seconds in _KEEPALIVE.items():
        if hasattr(socket, name):
            connected.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), seconds)
    if connected.getsockname()[0] == connected.getpeername()[0] and hasattr(
        socket, "TCP_CONGESTION"
    ):
        # the system may not have it, or not let us choose
        with contextlib.suppress(OSError):
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, _LOOPBACK_CONGESTION)


def is_itself(connected: socket.socket) -> bool:
    """True for a socket that is connected to itself.

    Calling a port of this machine where nobody listens may end so: when the kernel chooses that
    very port for the calling side.
    """
    return bool(connected.getsockname() == connected.getpeername())
