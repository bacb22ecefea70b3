# SPDX-License-Identifier: Apache-2.0
"""Measure round trip, bandwidth, open ports and clocks between two machines."""

from __future__ import annotations

import contextlib
import select
import socket
import statistics
import time
from collections.abc import Iterable
from typing import Any

import msgspec

from fleetlight.errors import DeadlineError, FleetError, PeerLostError
from fleetlight.launch.doctor.channel import DoctorChannel, dial
from fleetlight.launch.doctor.messages import (
    Acknowledged,
    Echo,
    GetTime,
    Link,
    Receive,
    Received,
    Time,
)
from fleetlight.roles.secret import Secret

#: the limit of one message or one connection
LIMIT_S = 5.0
#: the limit of a connection to one port
PORT_S = 2.0
_ECHOES = 20
_CHUNK = bytes(1 << 17)
#: how much longer than asked a receiver waits for bytes that it counts
_FIRST_S = 2.0
#: how long a receiver drains a connection after its report
_DRAIN_S = 1.0


def measure(
    own: str,
    to: str,
    port: int,
    link: Link,
    ports: Iterable[int],
    seconds: float,
    token: Secret | None = None,
) -> Link:
    """Measure the link to another machine's doctor; failures are part of the result."""
    try:
        wire = dial(to, port, own, LIMIT_S)
    except OSError as error:
        return _with(link, error=f"port {port}: {why(error)}")
    try:
        if token is not None:
            wire.introduce(token, own, to)
        trip = round_trip(wire)
        received = send_for(wire, seconds)
    except FleetError as error:
        return _with(link, error=str(error))
    finally:
        wire.close()
    rate = received.count / received.seconds if received.count and received.seconds else 0.0
    return _with(link, round_trip_s=trip, bytes_per_s=rate, closed=unreachable(own, to, ports))


def _with(link: Link, **found: Any) -> Link:
    return msgspec.structs.replace(link, **found)


def why(error: OSError) -> str:
    """A connection error in few words."""
    if isinstance(error, TimeoutError):
        return "no reply"
    return (error.strerror or str(error)).lower()


def round_trip(wire: DoctorChannel) -> float:
    """The median of the seconds from a small message to its reply."""
    taken = []
    for _ in range(_ECHOES):
        begin = time.perf_counter()
        wire.call(Echo(), Acknowledged)
        taken.append(time.perf_counter() - begin)
    return statistics.median(taken)


def clock_ahead(wire: DoctorChannel) -> float:
    """By how much the peer's clock is ahead of this one, from the fastest reply."""
    found = []
    for _ in range(_ECHOES):
        begin, now = time.perf_counter(), time.time()
        theirs = wire.call(GetTime(), Time).now
        taken = time.perf_counter() - begin
        found.append((taken, theirs - now - taken / 2))
    return min(found)[1]


def unreachable(own: str, to: str, ports: Iterable[int]) -> dict[int, str]:
    """The ports that refuse connections, and why."""
    closed = {}
    for port in ports:
        try:
            socket.create_connection((to, port), PORT_S, (own, 0)).close()
        except OSError as error:
            closed[port] = why(error)
    return closed


def send_for(wire: DoctorChannel, seconds: float) -> Received:
    """Send as fast as possible for `seconds`; return the receiver's report.

    The receiver measures, since sent bytes may still be in buffers.
    """
    wire.send(Receive(seconds))
    with wire.raw() as connected:
        connected.setblocking(False)
        try:
            _push_until_reply(connected, time.monotonic() + seconds + wire.limit_s)
        except TimeoutError:
            raise DeadlineError(f"{wire.peer} did not report how much it received") from None
        except OSError as error:
            raise PeerLostError(f"{wire.peer} disconnected ({why(error)})") from None
    return wire.receive(Received)


def _push_until_reply(connected: socket.socket, until: float) -> None:
    while time.monotonic() < until:
        readable, writable, _ = select.select([connected], [connected], [], 0.1)
        if readable:
            return
        if writable:
            with contextlib.suppress(BlockingIOError):
                connected.send(_CHUNK)
    raise TimeoutError


def receive_for(wire: DoctorChannel, seconds: float) -> None:
    """Receive for `seconds`, report how much arrived, and drain the rest."""
    with wire.raw() as connected:
        count, took = _received_bytes(connected, seconds, _FIRST_S)
    wire.send(Received(count, took))
    with wire.raw() as connected:
        # closing with unread bytes would reset the connection, and the report would be lost
        connected.shutdown(socket.SHUT_WR)
        _received_bytes(connected, _DRAIN_S, 0.0)


def _received_bytes(connected: socket.socket, seconds: float, first_s: float) -> tuple[int, float]:
    """Count bytes for `seconds` from the first ones, or until the end.

    While none is counted, it waits up to `first_s` longer: a busy machine is not a dead link.
    """
    buffer = bytearray(1 << 20)
    count, begin, last = 0, 0.0, 0.0
    end = time.monotonic() + seconds
    while (left := end + (0.0 if count else first_s) - time.monotonic()) > 0:
        connected.settimeout(left)
        try:
            got = connected.recv_into(buffer)
        except OSError:
            break
        if not got:
            break
        last = time.perf_counter()
        if begin == 0.0:
            begin = last  # the first bytes were sent before the clock started
            end = time.monotonic() + seconds
        else:
            count += got
    return count, last - begin
