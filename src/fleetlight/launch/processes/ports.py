# SPDX-License-Identifier: Apache-2.0
"""Reserve ports from the moment they are chosen until the job ends."""

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
    """A port reserved for a child.

    A port that is found free and released may be taken by another process. So its socket stays
    open until the job ends: bound, with SO_REUSEADDR, but not listening. Linux then gives the
    port to no process that asks for any free one. A process that sets SO_REUSEADDR too, as
    torch's TCPStore and Fleetlight's servers do, can still bind it and listen. Other systems
    refuse the second bind; there the port is released just before the children start.
    """

    def __init__(self, host: str, port: int = 0, remedy: str = "another --start_port") -> None:
        """`remedy` is what the user can choose if the port is taken."""
        self._socket = socket.socket(_family(host), socket.SOCK_STREAM)
        try:
            _bind(self._socket, host, port, remedy)
        except BaseException:
            self._socket.close()
            raise
        self.port: int = self._socket.getsockname()[1]

    def hand_over(self) -> None:
        """Release the port where a child could not bind it otherwise."""
        if sys.platform != "linux":
            self.close()

    def close(self) -> None:
        """Release the port."""
        self._socket.close()


def reserve(host: str, count: int, start_port: int | None = None) -> list[Reservation]:
    """Reserve `count` ports on `host`: any free ones, or those from `start_port` on."""
    if start_port is not None and start_port + count > 65536:
        raise LaunchError(
            f"--start_port {start_port}: this machine needs {count} ports, up to "
            f"{start_port + count - 1}, expected at most 65535; choose a lower port"
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
    """A listening socket on a fixed port, or None if the port is taken."""
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


def _bind(held: socket.socket, host: str, port: int, remedy: str) -> None:
    try:
        if port == 0:
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            held.bind((host, 0))
        else:
            _bind_fixed(held, host, port)
    except OSError as error:
        raise _cannot_bind(host, port, error, remedy) from None


def _bind_fixed(held: socket.socket, host: str, port: int) -> None:
    # first without SO_REUSEADDR, with which the reservation of another fleetrun would not conflict
    # a connection of an earlier run in TIME_WAIT does not count as taken
    try:
        held.bind((host, port))
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    except OSError as error:
        if error.errno != errno.EADDRINUSE or not _only_time_wait(port):
            raise
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind((host, port))


def _cannot_bind(host: str, port: int, error: OSError, remedy: str = "another port") -> LaunchError:
    if error.errno == errno.EADDRINUSE:
        return LaunchError(
            f"port {port} on {host} is taken{owner(port)}; end that process or choose {remedy}"
        )
    if error.errno == errno.EADDRNOTAVAIL:
        return LaunchError(f"{host} is not an address of this machine; pass --host with one")
    return LaunchError(f"cannot use port {port} on {host}: {error.strerror}")


def _only_time_wait(port: int) -> bool:
    states = {entry.state for entry in tcp_entries(port)}
    return states == {_TIME_WAIT}


def owner(port: int) -> str:
    """` by process 123 (python train.py)`, or a guess if the process is unknown."""
    found = listener(port)
    return f" by {found}" if found else " (another fleetrun may hold it)"


def listener(port: int) -> str:
    """`process 123 (python train.py)` for what listens on a port of this machine; "" if nothing."""
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
        # the code of `python -c` may have several lines
        return " ".join(text.split())[:80]
    return "unknown command"
