# SPDX-License-Identifier: Apache-2.0
"""The addresses of this machine."""

import os
import socket
import sys
from pathlib import Path

import pytest

from fleetlight.roles import address

linux = pytest.mark.skipif(sys.platform != "linux", reason="asks the Linux kernel")


@pytest.fixture
def own_name(monkeypatch: pytest.MonkeyPatch) -> str:
    """A hostname that resolves to 127.0.1.1, as Debian's installer writes it."""
    real = socket.getaddrinfo

    def resolver(host: str, *rest: object, **named: object) -> object:
        return real("127.0.1.1" if host == "myself" else host, *rest, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(socket, "getaddrinfo", resolver)
    return "myself"


@pytest.mark.parametrize("text", ["127.0.0.1", "127.0.1.1", "::1", "localhost"])
def test_loopback(text: str) -> None:
    assert address.is_loopback(text)


@pytest.mark.parametrize("text", ["10.0.0.1", "fd00::1", "node1", ""])
def test_not_loopback(text: str) -> None:
    assert not address.is_loopback(text)


def test_names_are_resolved_to_ipv4_first(monkeypatch: pytest.MonkeyPatch) -> None:
    assert address.resolve("192.0.2.7") == "192.0.2.7"
    both = [
        (socket.AF_INET6, socket.SOCK_STREAM, 6, "", ("fd00::7", 0, 0, 0)),
        (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("192.0.2.7", 0)),
    ]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: both)
    assert address.resolve("node1") == "192.0.2.7"
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: both[:1])
    assert address.resolve("node1") == "fd00::7"


@pytest.mark.parametrize("name", ["host.invalid", "x" * 70, "a\0b", "a..b"])
def test_unknown_name_is_an_error(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = socket.getaddrinfo

    def offline(host: str, *rest: object, **named: object) -> object:
        if host == "host.invalid":
            raise socket.gaierror(socket.EAI_NONAME, "unknown")
        return real(host, *rest, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(socket, "getaddrinfo", offline)
    assert address.resolve(name) is None
    assert address.route_to(name) == "127.0.0.1"
    assert not address.is_own(name)
    assert address.interface_of(name) is None


def test_route_to_this_machine_is_the_loopback() -> None:
    assert address.is_loopback(address.route_to("127.0.0.1"))


def test_route_to_another_machine_is_an_own_address() -> None:
    # documentation addresses: no packet is sent to them
    assert address.is_own(address.route_to("198.51.100.1"))
    assert not address.is_own("198.51.100.1")


def test_hostname_of_the_loopback_is_resolved(own_name: str) -> None:
    assert address.resolve(own_name) == "127.0.1.1"
    assert address.is_loopback(address.route_to(own_name))


@linux
def test_loopback_has_its_interface(own_name: str) -> None:
    assert ("lo", "127.0.0.1") in address.own_addresses()
    for name in ("127.0.0.1", "127.0.1.1", "localhost", own_name):
        assert address.interface_of(name) == "lo"
        assert address.is_own(name)


@linux
def test_each_interface_is_found_by_its_address() -> None:
    known = address.own_addresses()
    for _, own in known:
        assert (address.interface_of(own), own) in known
        assert address.is_own(own)


def test_interface_may_have_several_addresses() -> None:
    known = (("lo", "127.0.0.1"), ("dummy", "127.0.0.9"), ("eth0", "10.0.0.1"), ("eth0", "fd00::1"))
    for own in ("10.0.0.1", "fd00::1"):
        assert address.interface_of(own, known) == "eth0"
    # the loopback owns the rest of 127.0.0.0/8
    assert address.interface_of("127.0.0.8", known) == "lo"
    assert address.interface_of("127.0.0.9", known) == "dummy"
    assert address.interface_of("10.0.0.2", known) is None


def test_ipv6_addresses_come_from_the_kernels_table(tmp_path: Path) -> None:
    table = tmp_path / "if_inet6"
    table.write_text(
        "fe80000000000000021132fffe445566 02 40 20 80     eth0\n"
        "fd000000000000000000000000000001 02 40 00 80     eth0\n"
        "00000000000000000000000000000001 01 80 10 80       lo\n"
    )
    assert list(address._ipv6_addresses(table)) == [("eth0", "fd00::1"), ("lo", "::1")]
    assert list(address._ipv6_addresses(tmp_path / "none")) == []


def test_own_name_is_resolved_without_linux(monkeypatch: pytest.MonkeyPatch, own_name: str) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(socket, "gethostname", lambda: own_name)
    assert address.own_addresses() == (("", "127.0.0.1"), ("", "127.0.1.1"))
    assert address.interface_of("127.0.0.1") is None


def test_missing_route_differs_from_a_loopback_route(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*_: object) -> None:
        raise OSError("network is unreachable")

    assert address.find_route("127.0.0.1") == "127.0.0.1"
    monkeypatch.setattr(socket.socket, "connect", unreachable)
    assert address.find_route("198.51.100.1") is None
    assert address.route_to("198.51.100.1") == "127.0.0.1"


def test_foreign_addresses_are_not_own() -> None:
    assert not address.is_own("198.51.100.1")
    assert address.interface_of("198.51.100.1") is None


@linux
def test_gloo_gets_the_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "")
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    assert address.choose_interface("198.51.100.1") == "left to gloo"
    assert address.choose_interface("127.0.0.1") == "lo"
    assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"


def test_interface_set_by_the_user_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    assert address.choose_interface("127.0.0.1") == "eth7"
