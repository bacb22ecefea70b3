# SPDX-License-Identifier: Apache-2.0
"""Carries messages and arrays between workers and servers: sockets, TLS, deadlines, reconnecting.

A connection has one request in flight; a client opens more connections for more requests. That
needs no bookkeeping, cannot deadlock on full buffers and keeps one thread in a TLS session.
"""

from fleetlight.ps.transport.channel import SocketChannel, connect_all
from fleetlight.ps.transport.interface import (
    Channel,
    Connection,
    Handler,
    MemoryChannel,
    ReceivedReply,
    Reply,
)
from fleetlight.ps.transport.listener import Listener

__all__ = [
    "Channel",
    "Connection",
    "Handler",
    "Listener",
    "MemoryChannel",
    "ReceivedReply",
    "Reply",
    "SocketChannel",
    "connect_all",
]
