# SPDX-License-Identifier: Apache-2.0
"""Ports that are ours from the moment they are chosen until the job ends."""

from __future__ import annotations

import contextlib
import errno
import os
import pathlib
import socket
import sys
from collections.abc import Iterator

from fleetlight.errors import LaunchError
from fleetlight.wire.descriptors import open_sockets, tcp_entries

#: states of /proc/net/tcp
_TIME_WAIT, _LISTEN = "06", "0A"


class Reservation:
    """A port held for a child.

    Looking for a free port and closing it again leaves a gap in which somebody else may get it. So
    the socket stays open for the life of the job: bound, with SO_REUSEADDR, but never listening.
    Linux hands such a port to nobody who asks for a free one, yet lets a process bind and listen
    on it when that process sets SO_REUSEADDR too, as torch's TCPStore and our servers do. Other
    systems refuse the second bind; there the port is let go just before the children start.
    """

    def __init__(self, host: str, port: int = 0, said: str = "another --start_port") -> None:
        """`said` is what else the user can say where the port is taken."""
        self._socket = socket.socket(_family(host), socket.SOCK_STREAM)
        try:
            _bind(self._socket, host, port, said)
        except BaseException:
            self._socket.close()
            raise
        self.port: int = self._socket.getsockname()[1]

    def hand_over(self) -> None:
        """Let a child have the port."""
        if sys.platform != "linux":
            self.close()

    def close(self) -> None:
        """Give the port back."""
        self._socket.close()


def reserve(host: str, count: int, start_port: int | None = None) -> list[Reservation]:
    """`count` ports on `host`: any free ones, or `start_port` and those after it."""
    if start_port is not None and start_port + count > 65536:
        raise LaunchError(
            f"--start_port {start_port}: this machine needs {count} ports, the last would be "
            f"{start_port + count - 1}; choose a lower port"
        )
    held: list[Reservation] = []
    try:
        for offset in range(count):
            held.append(Reservation(host, 0 if start_port is None else start_port + offset))
    except BaseException:
        for reservation in held:
            reservation.close()
        raise
    return held


def listen(host: str, port: int) -> socket.socket | None:
    """A listening socket on a fixed port, or None when the port is taken."""
    listener = socket.socket(_family(host), socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(1024)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            return None
        raise _cannot_bind(host, port, error) from None
    return listener


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _bind(held: socket.socket, host: str, port: int, said: str) -> None:
    try:
        if port == 0:
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            held.bind((host, 0))
        else:
            _bind_fixed(held, host, port)
    except OSError as error:
        raise _cannot_bind(host, port, error, said) from None


def _bind_fixed(held: socket.socket, host: str, port: int) -> None:
    # First without SO_REUSEADDR: with it, the reservation of another fleetrun would let us in.
    # What an earlier run left in TIME_WAIT does not count as taken.
    try:
        held.bind((host, port))
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    except OSError as error:
        if error.errno != errno.EADDRINUSE or not _only_time_wait(port):
            raise
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind((host, port))


def _cannot_bind(host: str, port: int, error: OSError, said: str = "another port") -> LaunchError:
    if error.errno == errno.EADDRINUSE:
        return LaunchError(
            f"port {port} on {host} is taken{owner(port)}; end that process or choose {said}"
        )
    if error.errno == errno.EADDRNOTAVAIL:
        return LaunchError(f"{host} is not an address of this machine; say --host with one that is")
    return LaunchError(f"cannot use port {port} on {host}: {error.strerror}")


def _only_time_wait(port: int) -> bool:
    states = {entry.state for entry in tcp_entries(port)}
    return states == {_TIME_WAIT}


def owner(port: int) -> str:
    """` by process 123 (python train.py)`, or as much of it as can be known."""
    found = listener(port)
    return f" by {found}" if found else " (another fleetrun may hold it)"


def listener(port: int) -> str:
    """`process 123 (python train.py)`: what listens on a port of this machine; empty: nothing."""
    found = {f"socket:[{entry.inode}]" for entry in tcp_entries(port) if entry.state == _LISTEN}
    for pid in _processes() if found else ():
        if not found.isdisjoint(open_sockets(pid).values()):
            return f"process {pid} ({_command(pid)})"
    return "another user's process" if found else ""


def _processes() -> Iterator[str]:
    with contextlib.suppress(OSError):
        yield from (name for name in os.listdir("/proc") if name.isdigit())


def _command(pid: str) -> str:
    with contextlib.suppress(OSError):
        words = pathlib.Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        text = b" ".join(words).decode(errors="replace")
        # `python -c` may bring lines of its own
        return " ".join(text.split())[:80]
    return "unknown command"
