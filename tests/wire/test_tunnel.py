# SPDX-License-Identifier: Apache-2.0
"""Tunnels: plain connections at both ends, TLS between, and no access for others."""

import contextlib
import gc
import itertools
import logging
import resource
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from fleetlight.security.certificates import make
from fleetlight.security.context import client_context, server_context
from fleetlight.wire import listening, tunnel
from fleetlight.wire.control_signals import NO_SIGNAL, ControlSignal, combined
from fleetlight.wire.tunnel import Tunnel, entrance_to, exit_at

LIMIT_S = 20.0


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Certificates of this job and of another job."""
    ours, theirs = tmp_path_factory.mktemp("ours"), tmp_path_factory.mktemp("theirs")
    make(ours)
    make(theirs)
    return ours, theirs


@pytest.fixture
def echo() -> Iterator[tuple[str, int]]:
    """A server that returns its input in upper case."""

    def serve(client: socket.socket) -> None:
        with client, contextlib.suppress(OSError):
            while data := client.recv(1 << 16):
                client.sendall(data.upper())

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                threading.Thread(target=serve, args=(listener.accept()[0],), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        yield listener.getsockname()
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(LIMIT_S)


class Warnings:
    """Records the warnings of a tunnel."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self._news = threading.Event()

    def __call__(self, text: str) -> None:
        self.texts.append(text)
        self._news.set()

    def first(self) -> str:
        assert self._news.wait(LIMIT_S)
        return self.texts[0]


@contextlib.contextmanager
def opened(tunnel_: Tunnel) -> Iterator[Tunnel]:
    try:
        yield tunnel_
    finally:
        tunnel_.close()


def tunnel_exit(echo: tuple[str, int], folder: Path) -> Tunnel:
    return exit_at(socket.create_server(("127.0.0.1", 0)), echo, server_context(folder))


def received(connected: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count and (more := connected.recv(1 << 16)):
        data += more
    return data


def test_bytes_pass_through_the_tunnel(echo: tuple[str, int], folders: tuple[Path, Path]) -> None:
    with (
        opened(tunnel_exit(echo, folders[0])) as out,
        opened(entrance_to(out.address, client_context(folders[0]))) as into,
        socket.create_connection(into.address, LIMIT_S) as first,
        socket.create_connection(into.address, LIMIT_S) as second,
    ):
        large = b"abc" * 100_000
        sender = threading.Thread(target=second.sendall, args=(large,))
        sender.start()
        first.sendall(b"hello")
        assert received(first, 5) == b"HELLO"
        assert received(second, len(large)) == large.upper()
        sender.join(LIMIT_S)


def test_closing_ends_the_connection(echo: tuple[str, int], folders: tuple[Path, Path]) -> None:
    with opened(tunnel_exit(echo, folders[0])) as out:
        into = entrance_to(out.address, client_context(folders[0]))
        with socket.create_connection(into.address, LIMIT_S) as connected:
            connected.sendall(b"hello")
            received(connected, 5)
            into.close()
            assert connected.recv(10) == b""


def test_a_plain_client_gets_nothing(echo: tuple[str, int], folders: tuple[Path, Path]) -> None:
    with (
        opened(tunnel_exit(echo, folders[0])) as out,
        socket.create_connection(out.address, LIMIT_S) as stranger,
    ):
        stranger.sendall(b"hello" * 100)
        with contextlib.suppress(ConnectionResetError):
            assert b"HELLO" not in received(stranger, 5)


def test_a_foreign_certificate_is_refused(
    echo: tuple[str, int], folders: tuple[Path, Path]
) -> None:
    warnings = Warnings()
    with (
        opened(tunnel_exit(echo, folders[0])) as out,
        opened(entrance_to(out.address, client_context(folders[1]), warnings)) as into,
        socket.create_connection(into.address, LIMIT_S) as connected,
    ):
        assert connected.recv(10) == b""
        assert "another CA signed the certificate" in warnings.first()


def test_a_missing_remote_is_reported(folders: tuple[Path, Path]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        nowhere = listener.getsockname()
    warnings = Warnings()
    with (
        opened(entrance_to(nowhere, client_context(folders[0]), warnings)) as into,
        socket.create_connection(into.address, LIMIT_S) as connected,
    ):
        assert connected.recv(10) == b""
        assert warnings.first().startswith("a TLS connection failed: ")


def test_a_silent_remote_may_listen_without_tls(
    folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tunnel, "_CONNECT_S", 0.2)
    warnings = Warnings()
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        opened(entrance_to(silent.getsockname(), client_context(folders[0]), warnings)) as into,
        socket.create_connection(into.address, LIMIT_S) as connected,
    ):
        assert connected.recv(10) == b""
        expected = "a TLS connection failed: no reply; does the other side listen without"
        assert warnings.first().startswith(expected)


def test_processes_of_other_users_are_refused(
    echo: tuple[str, int], folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    warnings = Warnings()
    with (
        opened(tunnel_exit(echo, folders[0])) as out,
        opened(entrance_to(out.address, client_context(folders[0]), warnings)) as into,
    ):
        monkeypatch.setattr(tunnel.os, "getuid", lambda: -1)
        with socket.create_connection(into.address, LIMIT_S) as connected:
            assert connected.recv(10) == b""
        assert "another user" in warnings.first()


def test_the_exit_speaks_tls_only(echo: tuple[str, int], folders: tuple[Path, Path]) -> None:
    with opened(tunnel_exit(echo, folders[0])) as out:
        plain = socket.create_connection(out.address, LIMIT_S)
        with client_context(folders[0]).wrap_socket(plain, server_hostname="127.0.0.1") as wire:
            assert isinstance(wire, ssl.SSLSocket)
            wire.sendall(b"hello")
            assert wire.recv(5) == b"HELLO"
            assert wire.version() == "TLSv1.3"


def test_closing_ends_connections_with_bytes_that_nobody_reads(folders: tuple[Path, Path]) -> None:
    """Their sockets would stay open until a garbage collection, which warns."""
    with socket.create_server(("127.0.0.1", 0)) as listener, contextlib.ExitStack() as stack:
        leave = exit_at(
            socket.create_server(("127.0.0.1", 0)),
            listener.getsockname(),
            server_context(folders[0]),
        )
        stack.callback(leave.close)
        enter = entrance_to(leave.address, client_context(folders[0]))
        stack.callback(enter.close)
        near = stack.enter_context(socket.create_connection(enter.address, LIMIT_S))
        far = stack.enter_context(listener.accept()[0])
        near.settimeout(0.5)
        with contextlib.suppress(TimeoutError):
            while True:
                near.send(bytes(1 << 16))
        # the far side ends its direction and reads nothing
        far.shutdown(socket.SHUT_WR)
        near.settimeout(LIMIT_S)
        with contextlib.suppress(ConnectionResetError):
            assert near.recv(1) == b""
        enter.close()
        leave.close()
        gc.collect()


# -- limits of open descriptors


PROGRAM = """
import resource
from fleetlight.wire.descriptors import allow_descriptors
resource.setrlimit(resource.RLIMIT_NOFILE, (100, 200))
print(allow_descriptors(50), allow_descriptors(150), allow_descriptors(500))
print(resource.getrlimit(resource.RLIMIT_NOFILE))
"""


@pytest.mark.slow
def test_the_limit_rises_to_the_hard_one_at_most() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert done.stdout.splitlines() == ["50 150 200", "(200, 200)"], done.stderr
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 200


# -- control signals are combined in any order


CALLS = [
    NO_SIGNAL,
    ControlSignal(stop=True),
    ControlSignal(saves=2),
    ControlSignal(True, 1),
    ControlSignal(saves=5),
]


def test_control_signals_are_combined() -> None:
    assert ControlSignal(stop=True) | ControlSignal(saves=3) == ControlSignal(True, 3)
    assert combined([]) == NO_SIGNAL
    for one, other in itertools.product(CALLS, CALLS):
        assert one | other == other | one
        assert one | other | one == one | other
    assert combined(CALLS) == ControlSignal(True, 5)


# -- A rendezvous listens at one address, and at all only if no other choice is known


OUTSIDE = "127.0.0.3"
#: addresses of names; 127.0.0.3 stands for an address that other hosts know
NAMES = {"debian": "127.0.1.1", "plain": OUTSIDE, "gateway": "203.0.113.1"}


@pytest.fixture
def outside(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The addresses of this machine that other hosts may know."""
    known = [OUTSIDE]
    real = listening.is_loopback
    monkeypatch.setattr(listening, "resolve", lambda host: NAMES.get(host, host))
    monkeypatch.setattr(listening, "is_loopback", lambda a: a not in known and real(a))
    monkeypatch.setattr(
        listening, "own_addresses", lambda: (("lo", "127.0.0.1"), *(("eth", a) for a in known))
    )
    return known


def listens_at(host: str) -> tuple[str, str]:
    """The address at which a master of this name listens, and the address to reach it locally."""
    listener, reached_at = listening.listen_at((host, 0))
    with listener:
        return listener.getsockname()[0], reached_at


@pytest.mark.usefixtures("outside")
@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "plain"])
def test_store_listens_at_the_given_address(host: str, caplog: pytest.LogCaptureFixture) -> None:
    expected = NAMES.get(host, host)
    assert listens_at(host) == (expected, expected)
    assert not caplog.records


@pytest.mark.usefixtures("outside")
def test_a_loopback_name_means_the_only_outside_address(caplog: pytest.LogCaptureFixture) -> None:
    assert listens_at("debian") == (OUTSIDE, OUTSIDE)
    assert not caplog.records


def test_without_a_network_a_loopback_name_is_the_loopback(outside: list[str]) -> None:
    outside.clear()
    assert listens_at("debian") == ("127.0.1.1", "127.0.1.1")


def test_an_ambiguous_name_listens_everywhere_with_a_warning(
    outside: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    outside.append("127.0.0.4")
    with caplog.at_level(logging.WARNING, "fleetlight"):
        assert listens_at("debian")[0] == listens_at("gateway")[0] == "0.0.0.0"
    first, second = (record.getMessage() for record in caplog.records)
    assert "listening on all interfaces" in first
    assert "others may connect to any of 127.0.0.3, 127.0.0.4; give the master's address" in first
    assert "gateway is not an address of this machine" in second


@pytest.mark.usefixtures("outside")
def test_address_0_0_0_0_listens_everywhere(caplog: pytest.LogCaptureFixture) -> None:
    assert listens_at("0.0.0.0")[0] == "0.0.0.0"
    assert not caplog.records
