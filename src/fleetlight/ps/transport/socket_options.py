# SPDX-License-Identifier: Apache-2.0
"""Options of the sockets of a job."""

from __future__ import annotations

import contextlib
import socket

#: detects a vanished machine after about a minute, even on an idle connection
_KEEPALIVE = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3}
#: BBR, the default of some systems, is made for long paths: it takes 2.4 times the CPU time per
#: byte on the loopback
_LOOPBACK_CONGESTION = b"reno"


def family(host: str) -> socket.AddressFamily:
    """The family of an address; unresolved names count as IPv4."""
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def prepare(connected: socket.socket) -> None:
    """Set the options of a newly connected socket."""
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, seconds in _KEEPALIVE.items():
        if hasattr(socket, name):
            connected.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), seconds)
    if connected.getsockname()[0] == connected.getpeername()[0] and hasattr(
        socket, "TCP_CONGESTION"
    ):
        # the system may lack the algorithm or forbid the choice
        with contextlib.suppress(OSError):
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, _LOOPBACK_CONGESTION)


def is_itself(connected: socket.socket) -> bool:
    """True for a socket that is connected to itself.

    This happens on a local port without a listener, when the kernel chooses the same port for the
    client side.
    """
    return bool(connected.getsockname() == connected.getpeername())
