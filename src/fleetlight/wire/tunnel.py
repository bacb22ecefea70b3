# SPDX-License-Identifier: Apache-2.0
"""Tunnels that carry plain TCP connections inside TLS.

torch's store has no TLS. On its host, a tunnel's exit accepts TLS connections and forwards them
to the store, which listens on the loopback. On other hosts, a tunnel's entrance accepts
connections on the loopback and forwards them inside TLS.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import ssl
import threading
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, TypeAlias

from fleetlight.roles.role import Endpoint
from fleetlight.security.tls_errors import explain
from fleetlight.wire.descriptors import tcp_entries
from fleetlight.wire.forking import keep_from_children, keep_port_from_children

_LOOPBACK = "127.0.0.1"
_CHUNK_BYTES = 1 << 16
_CONNECT_S = 10.0
_STOP_S = 5.0
#: after this time a task that continues is cancelled again
_CANCEL_S = 0.1

Streams: TypeAlias = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Tunnel:
    """Forwards the connections to one port to another endpoint, on a thread of its own."""

    def __init__(
        self,
        listener: socket.socket,
        far: Callable[[], Awaitable[Streams]],
        *,
        tls: ssl.SSLContext | None = None,
        own_user_only: bool = False,
        warn: Callable[[str], None] = lambda text: None,
    ) -> None:
        """`far` opens the other side; `tls` is for incoming connections.

        `warn` gets one sentence for each connection that fails.
        """
        host, port = listener.getsockname()[:2]
        #: the address at which it listens
        self.address: Endpoint = (host, port)
        self._far, self._tls, self._warn = far, tls, warn
        self._own_user_only = own_user_only
        keep_from_children(listener)
        keep_port_from_children(port)
        self._listener = listener
        self._loop = asyncio.new_event_loop()
        #: the socket of each connection that may be open
        self._writers: dict[asyncio.StreamWriter, Any] = {}
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, name="fleet-tunnel", daemon=True)
        self._thread.start()
        self._ready.wait(_STOP_S)

    def close(self) -> None:
        """Stop listening and close all connections; a second call has no effect."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._loop.stop)
        if threading.current_thread() is not self._thread:
            self._thread.join(_STOP_S)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            server = self._loop.run_until_complete(self._listening())
            self._ready.set()
            self._loop.run_forever()
            server.close()
            self._loop.run_until_complete(self._hang_up())
        finally:
            self._ready.set()
            self._loop.close()

    async def _listening(self) -> asyncio.Server:
        limit_s = _CONNECT_S if self._tls else None
        return await asyncio.start_server(
            self._serve, sock=self._listener, ssl=self._tls, ssl_handshake_timeout=limit_s
        )

    async def _hang_up(self) -> None:
        """Abort all connections and let the loop close their sockets."""
        this = asyncio.current_task()
        talks = {talk for talk in asyncio.all_tasks() if talk is not this}
        while talks:
            for talk in talks:
                talk.cancel()
            # a connection that opens just now takes a second request: wait_for drops the first
            ended, talks = await asyncio.wait(talks, timeout=_CANCEL_S)
            await asyncio.gather(*ended, return_exceptions=True)
        self._forget_closed()
        for writer in self._writers:
            writer.transport.abort()
        # transports close their sockets in later calls of the loop
        end = self._loop.time() + _STOP_S
        while self._forget_closed() and self._loop.time() < end:
            await asyncio.sleep(0)
        await asyncio.sleep(0)

    def _forget_closed(self) -> bool:
        """Forget the writers whose sockets are closed; True if others remain."""
        self._writers = {w: endpoint for w, endpoint in self._writers.items() if _is_open(endpoint)}
        return bool(self._writers)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # the tunnel cancels this task when it closes
        with contextlib.suppress(asyncio.CancelledError), self._open(writer):
            if self._own_user_only and not _is_own(writer.get_extra_info("peername")[1]):
                self._warn("refused a connection of another user's process to the job's tunnel")
                return
            far = await self._far_side()
            if far is not None:
                keep_from_children(far[1].get_extra_info("socket"))
                with self._open(far[1]):
                    await _forward_both((reader, writer), far)

    async def _far_side(self) -> Streams | None:
        try:
            return await asyncio.wait_for(self._far(), _CONNECT_S)
        except ssl.SSLError as error:
            self._warn(f"a TLS connection failed: {explain(error)}")
        except (OSError, asyncio.TimeoutError) as error:
            # from 3.11 on a TimeoutError is an OSError; asyncio's have no text
            why = str(error) or "no reply; does the other side listen without TLS?"
            self._warn(f"a TLS connection failed: {why}")
        return None

    @contextlib.contextmanager
    def _open(self, writer: asyncio.StreamWriter) -> Iterator[None]:
        self._forget_closed()
        self._writers[writer] = writer.get_extra_info("socket")
        try:
            yield
        finally:
            # it closes after its last bytes, which the peer may never read
            writer.close()


def exit_at(
    listener: socket.socket,
    local: Endpoint,
    tls: ssl.SSLContext,
    warn: Callable[[str], None] = lambda text: None,
) -> Tunnel:
    """Accept TLS connections at `listener` and forward them to a port of this machine."""

    async def far() -> Streams:
        return await asyncio.open_connection(*local)

    return Tunnel(listener, far, tls=tls, warn=warn)


def entrance_to(
    remote: Endpoint, tls: ssl.SSLContext, warn: Callable[[str], None] = lambda text: None
) -> Tunnel:
    """Accept loopback connections of this user and forward them to `remote` inside TLS."""

    async def far() -> Streams:
        return await asyncio.open_connection(*remote, ssl=tls, server_hostname=remote[0])

    listener = socket.create_server((_LOOPBACK, 0))
    return Tunnel(listener, far, own_user_only=True, warn=warn)


async def _forward_both(near: Streams, far: Streams) -> None:
    ways = [asyncio.ensure_future(_forward(a[0], b[1])) for a, b in ((near, far), (far, near))]
    # when one side ends, the connection is over
    await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
    for way in ways:
        way.cancel()


async def _forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError, ssl.SSLError):
        while data := await reader.read(_CHUNK_BYTES):
            writer.write(data)
            await writer.drain()


def _is_open(endpoint: Any) -> bool:
    return endpoint is not None and endpoint.fileno() >= 0


def _is_own(port: int) -> bool:
    """True if a process of this user, or an unknown one, owns the loopback port `port`."""
    owners = [entry.uid for entry in tcp_entries(port)]
    return not owners or owners[0] == os.getuid()
