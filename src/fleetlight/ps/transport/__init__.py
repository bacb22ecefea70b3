# SPDX-License-Identifier: Apache-2.0
"""Carries messages and arrays between workers and servers: sockets, TLS, deadlines, reconnecting.

A connection has one request in flight; a client opens more connections for more requests. That
needs no bookkeeping, cannot deadlock on full buffers and keeps one thread in a TLS session.

`transport/` moves messages. `protocol.py` is the wire format: pure, fuzzed, and it compares every
length with a limit before it allocates memory. `frames.py` reads and writes whole frames on a
`Wire`. `channel.py` is the client's end, which reconnects and retries; `listener.py` and
`session.py` are the server's. `authentication.py` proves the token on both sides before the
server accepts a greeting. `memory/memory_budget.py` bounds the memory of incoming bodies. On one
host, bodies go through slots of shared memory: `memory_sharing.py` agrees on them over the
connection, `memory/body_slots.py` fills and releases them, and `wire/shared_memory.py` creates,
seals and passes the memory. `interface.py` has the protocols of both ends, and the channel to a
server in the same process. A handler asks its `Connection`, and a client its `Channel`, for the
memory of the next array (`output`), and allocates it where there is none.
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
