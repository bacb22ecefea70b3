# SPDX-License-Identifier: Apache-2.0
"""This machine's addresses, and the one that leads to a peer."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import pathlib
import socket
import struct
import sys
from collections.abc import Iterator
from typing import TypeAlias

#: (interface, address) pairs
Addresses: TypeAlias = tuple[tuple[str, str], ...]


def is_loopback(address: str) -> bool:
    """True for 127.0.0.0/8, ::1 and `localhost`."""
    if address == "localhost":
        return True
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(address).is_loopback
    return False


def resolve(host: str) -> str | None:
    """The first address of a name, IPv4 preferred; None if it does not resolve."""
    # a ValueError means an invalid name, such as one with a label of 64 letters
    with contextlib.suppress(OSError, ValueError):
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        return str(sorted(found, key=lambda entry: entry[0] != socket.AF_INET)[0][4][0])
    return None


def find_route(host: str) -> str | None:
    """This machine's address from which packets to `host` leave, None without a route.

    Connecting a datagram socket looks up the routing table and sends no packet. The result is
    right even where this machine's name resolves to 127.0.1.1.
    """
    target = resolve(host)
    if target is None:
        return None
    family = socket.AF_INET6 if ":" in target else socket.AF_INET
    with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((target, 9))
        return str(probe.getsockname()[0])
    return None


def route_to(host: str) -> str:
    """`find_route`, or the loopback address without a route."""
    return find_route(host) or "127.0.0.1"


def own_addresses() -> Addresses:
    """All (interface, address) pairs of this machine, IPv4 before IPv6, loopback included."""
    if sys.platform != "linux":
        return _addresses_by_name()
    return (*_ipv4_addresses(), *_ipv6_addresses(pathlib.Path("/proc/net/if_inet6")))


def _ipv4_addresses() -> Iterator[tuple[str, str]]:
    import array
    import fcntl

    # SIOCGIFCONF fills an array of `struct ifreq`: 16 bytes of name, then a sockaddr_in.
    siocgifconf, entry = 0x8912, 40 if struct.calcsize("P") == 8 else 32
    buffer = array.array("B", bytes(256 * entry))
    where, length = buffer.buffer_info()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        answer = fcntl.ioctl(asked, siocgifconf, struct.pack("iP", length, where))
    used, raw = struct.unpack("iP", answer)[0], buffer.tobytes()
    for at in range(0, used, entry):
        name, address = raw[at : at + 16].split(b"\0")[0], raw[at + 20 : at + 24]
        yield name.decode(), socket.inet_ntoa(address)


def _ipv6_addresses(table: pathlib.Path) -> Iterator[tuple[str, str]]:
    with contextlib.suppress(OSError):  # a kernel without IPv6
        for line in table.read_text().splitlines():
            address, *_, name = line.split()
            # a link-local address is useless without its interface
            if not address.startswith("fe80"):
                yield name, socket.inet_ntop(socket.AF_INET6, bytes.fromhex(address))


def _addresses_by_name() -> Addresses:
    """Without Linux's tables: what the host name resolves to, with "" as interfaces."""
    found = {"127.0.0.1"}
    with contextlib.suppress(OSError):
        entries = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
        found |= {str(entry[4][0]) for entry in entries}
    return tuple(("", address) for address in sorted(found))


def is_own(address: str) -> bool:
    """True when this machine has the address, because a socket can bind to it."""
    target = resolve(address)
    if target is None:
        return False
    family = socket.AF_INET6 if ":" in target else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((target, 0))
        except OSError:
            return False
    return True


def interface_of(address: str, among: Addresses | None = None) -> str | None:
    """The interface that has `address`; the loopback interface has all of 127.0.0.0/8."""
    own = own_addresses() if among is None else among
    target = resolve(address)
    exact = [name for name, mine in own if mine == target]
    loopbacks = [name for name, mine in own if is_loopback(mine)]
    fitting = exact or (loopbacks if is_loopback(target or "") else [])
    return (fitting[0] or None) if fitting else None


def choose_interface(address: str) -> str:
    """Make Gloo use the interface that has `address`, unless the user has chosen one.

    By default Gloo uses what the host name resolves to, which may be the loopback.
    """
    found = interface_of(address)
    if found is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", found)
    return os.environ.get("GLOO_SOCKET_IFNAME", "left to gloo")
