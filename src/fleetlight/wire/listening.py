# SPDX-License-Identifier: Apache-2.0
"""Listens at the address by which the members of a job know this machine, and finds it from there.

A name may be that of a gateway, or resolve to the loopback on its own machine.
"""

from __future__ import annotations

import errno
import socket

from fleetlight.errors import MembershipError
from fleetlight.observe.log import logger
from fleetlight.roles.address import is_loopback, own_addresses, resolve
from fleetlight.roles.role import Endpoint


def listen_at(endpoint: Endpoint) -> tuple[socket.socket, str]:
    """A socket that listens on one address, and the host by which this machine reaches it."""
    host, port = endpoint
    address = resolve(host)
    if address is None:
        raise MembershipError(f"the master's name {host!r} cannot be resolved on this machine")
    if is_loopback(address) and not is_loopback(host):
        return _listen_outside(host, port, address)
    try:
        return bound(address, port), address
    except OSError as error:
        if error.errno != errno.EADDRNOTAVAIL:
            raise
        # the address belongs to a gateway or service that forwards to this machine
        return bound("0.0.0.0", port, f"{host} is not an address of this machine"), "127.0.0.1"


def _listen_outside(host: str, port: int, address: str) -> tuple[socket.socket, str]:
    """Listen on an outside address: Debian resolves its own hostname to 127.0.1.1."""
    ways = _outside()
    if len(ways) > 1:
        why = (
            f"{host} resolves to {address} here, and others may connect to any of {', '.join(ways)}"
        )
        return bound("0.0.0.0", port, why), "127.0.0.1"
    [way] = ways or [address]
    return bound(way, port), way


def _outside() -> list[str]:
    """The addresses by which other machines may reach this one."""
    return [a for _, a in own_addresses() if ":" not in a and not is_loopback(a)]


def ways_to(endpoint: Endpoint) -> list[Endpoint]:
    """Addresses of the store; members on its own machine may know it by another one."""
    host, port = endpoint
    if is_loopback(host) or not is_loopback(resolve(host) or host):
        return [endpoint]
    return [endpoint, *((way, port) for way in _outside())]


def bound(address: str, port: int, why_all: str | None = None) -> socket.socket:
    """A socket that listens at one address of this machine; `why_all` is for a warning."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    # a launcher may have the port reserved; both sides set SO_REUSEADDR on purpose
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((address, port))
        listener.listen(1024)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRNOTAVAIL:
            raise
        raise MembershipError(
            f"port {port} of {address} cannot be opened for the job to meet: {error.strerror}; "
            "another job may be running: choose another port, or end it"
        ) from None
    if why_all is not None:
        logger.warning(
            "listening on all interfaces, port %d, because %s; give the master's address in place "
            "of its name to choose one",
            port,
            why_all,
        )
    return listener
