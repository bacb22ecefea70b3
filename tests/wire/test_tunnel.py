# SPDX-License-Identifier: Apache-2.0
"""Tunnels: plain connections at both ends, TLS between, and no access for others."""

import contextlib
import gc
import socket
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from fleetlight.security.certificates import make
from fleetlight.security.context import client_context, server_context
from fleetlight.wire import tunnel
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


def test_bytes_pass_from_the_entrance_to_the_exit(
    echo: tuple[str, int], folders: tuple[Path, Path]
) -> None:
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


def test_closing_the_entrance_ends_the_connection(
    echo: tuple[str, int], folders: tuple[Path, Path]
) -> None:
    with opened(tunnel_exit(echo, folders[0])) as out:
        into = entrance_to(out.address, client_context(folders[0]))
        with socket.create_connection(into.address, LIMIT_S) as connected:
            connected.sendall(b"hello")
            received(connected, 5)
            into.close()
            assert connected.recv(10) == b""


def test_a_plain_client_gets_nothing_from_the_exit(
    echo: tuple[str, int], folders: tuple[Path, Path]
) -> None:
    with (
        opened(tunnel_exit(echo, folders[0])) as out,
        socket.create_connection(out.address, LIMIT_S) as stranger,
    ):
        stranger.sendall(b"hello" * 100)
        with contextlib.suppress(ConnectionResetError):
            assert b"HELLO" not in received(stranger, 5)


def test_a_certificate_of_another_job_is_refused(
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
