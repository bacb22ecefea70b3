# SPDX-License-Identifier: Apache-2.0
"""Connections that break at every byte of their traffic: each push counts once."""

import contextlib
import errno
import itertools
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from tests.ps.serving import OPTIONS, hello, opened, plan

from fleetlight.ps import messages as m
from fleetlight.ps.server.server import Server
from fleetlight.ps.transport import Listener, SocketChannel
from fleetlight.ps.transport import channel as channel_module
from fleetlight.ps.transport.interface import RetryPolicy
from fleetlight.security import certificates
from fleetlight.security.context import client_context, server_context
from fleetlight.wire import plain

pytestmark = pytest.mark.slow

CLIENT, SERVER = "client", "server"


class ConnectionCutter:
    """Breaks connections, each after one side has sent so many more bytes."""

    def __init__(self) -> None:
        self.cuts: list[tuple[str, int]] = []

    def before(self, side: str, size: int) -> int:
        """The number of these bytes that may be sent."""
        if not self.cuts or self.cuts[0][0] != side:
            return size
        left = self.cuts[0][1]
        if left < size:
            del self.cuts[0]
            return left
        self.cuts[0] = side, left - size
        return size


class Cuttable:
    """A socket that sends only until the cut."""

    def __init__(self, real: socket.socket, cutter: ConnectionCutter, side: str) -> None:
        self._real, self._scissors, self._side = real, cutter, side

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def send(self, data: memoryview) -> int:
        return self.sendmsg([data])

    def sendmsg(self, buffers: Sequence[memoryview]) -> int:
        data = b"".join(buffers)
        size = self._scissors.before(self._side, len(data))
        if size == len(data):
            return self._real.sendmsg(buffers)
        with contextlib.suppress(OSError):
            self._real.sendall(data[:size])
            self._real.shutdown(socket.SHUT_RDWR)
        raise OSError(errno.ECONNRESET, "cut")


@pytest.fixture
def cutter(monkeypatch: pytest.MonkeyPatch) -> ConnectionCutter:
    """The cutter of all later connections."""
    shared, begin = ConnectionCutter(), plain.Wire.__init__
    monkeypatch.setattr(channel_module, "_TRY_EVERY_S", 0.001)

    def cuttable(one: plain.Wire, connected: socket.socket, peer: str) -> None:
        begin(one, connected, peer)
        side = CLIENT if peer.startswith("server") else SERVER
        one._socket = Cuttable(connected, shared, side)  # type: ignore[assignment]

    monkeypatch.setattr(plain.Wire, "__init__", cuttable)
    return shared


@pytest.fixture(scope="module")
def secrets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ssl") / "certificates"
    certificates.make(folder)
    return folder


@contextlib.contextmanager
def served(mode: str, secrets: Path | None) -> Iterator[SocketChannel]:
    """A worker's lane to a server; the worker joined on another lane."""
    with listened(opened(plan(mode, workers=1)), secrets) as listener:
        channel, control = (called(listener, lane, secrets) for lane in ("push", "control"))
        yield channel
        channel.close()
        control.close()


@contextlib.contextmanager
def listened(server: Server, secrets: Path | None) -> Iterator[Listener]:
    """The address of a server."""
    listener = Listener(("127.0.0.1", 0), server, tls=secrets and server_context(secrets))
    yield listener
    listener.stop()
    server.close()


def called(listener: Listener, lane: str, secrets: Path | None) -> SocketChannel:
    """A lane of a worker that joined and may reconnect."""
    joined = itertools.chain([False], itertools.repeat(True))
    return SocketChannel.connect(
        listener.address,
        "server 0",
        deadline_s=20.0,
        retry=RetryPolicy(10.0, restarts=True),
        tls=secrets and client_context(secrets),
        greeting=lambda: msgspec.structs.replace(hello(0, lane, 1), joined=next(joined)),
    )


def row(value: float) -> list[Any]:
    """The row of id 7."""
    return [np.array([7], np.int64), np.full((1, 2), value, np.float32)]


def push(channel: SocketChannel, number: int, *, hold: bool = False, sequence: int = 0) -> None:
    """A gradient that adds 1."""
    tables = [m.TablePush(0)]
    message = m.Push(sequence or number, 0, 0, number, 0, OPTIONS, tables, False, hold=hold)
    channel.call(message, row(-1.0))


def clipped(channel: SocketChannel, number: int) -> None:
    """A gradient that adds 1, in two parts."""
    push(channel, number, hold=True, sequence=2 * number)
    channel.call(m.Apply(2 * number + 1, 0, 0, number, 0, 1.0, OPTIONS), [])


def exchange(channel: SocketChannel, number: int) -> None:
    """A difference of 1."""
    answer = channel.call(m.GeoExchange(number, 0, number, [0], dense=False), row(1.0))
    assert answer.arrays[0][0, 0] == number + 1


#: by name: the mode and the requests
SAID: dict[str, tuple[str, Callable[[SocketChannel, int], None]]] = {
    "clipped": ("sync", clipped),
    "async": ("async", push),
    "sync": ("sync", push),
    "geo": ("geo", exchange),
}


@pytest.mark.parametrize(("name", "ssl"), [*((name, False) for name in SAID), ("async", True)])
@pytest.mark.parametrize("side", [CLIENT, SERVER])
def test_cut_at_any_byte_loses_and_doubles_no_push(
    name: str, ssl: bool, side: str, cutter: ConnectionCutter, secrets: Path
) -> None:
    mode, say = SAID[name]
    with served(mode, secrets if ssl else None) as channel:
        assert _cuts(channel, say, cutter, side) > 60


@pytest.mark.parametrize(("ssl", "step"), [(False, 1), (True, 17)], ids=["plain", "tls"])
@pytest.mark.parametrize("side", [CLIENT, SERVER])
def test_cut_during_a_reconnect_loses_and_doubles_no_push(
    ssl: bool, step: int, side: str, cutter: ConnectionCutter, secrets: Path
) -> None:
    with served("async", secrets if ssl else None) as channel:
        assert _cuts(channel, push, cutter, side, (CLIENT, 0), step=step) > 90


def test_goodbye_survives_a_cut_when_the_server_ends_with_it(cutter: ConnectionCutter) -> None:
    for number in range(100):
        server = opened(plan(workers=1))
        with listened(server, None) as listener:
            ending = threading.Thread(target=end_with_the_job, args=(server, listener))
            ending.start()
            channel = called(listener, "control", None)
            cutter.cuts = [(SERVER, number)]
            channel.call(m.Leave())
            is_over, cutter.cuts = bool(cutter.cuts), []
            channel.call(m.GoodbyeAck())
            channel.close()
            ending.join(20)
            assert not ending.is_alive()
        if is_over:
            break
    assert 20 < number < 99


def end_with_the_job(server: Server, listener: Listener) -> None:
    """Serve as a server process does."""
    server.wait()
    listener.stop()


def _cuts(
    channel: SocketChannel,
    say: Callable[[SocketChannel, int], None],
    cutter: ConnectionCutter,
    side: str,
    *before: tuple[str, int],
    step: int = 1,
) -> int:
    """Repeat the requests, each time with a cut one byte later; returns the number of cuts."""
    for number in range(5000):
        cutter.cuts = [*before, (side, step * number)]
        say(channel, number)
        if cutter.cuts:
            break
    else:
        pytest.fail("it had no end")
    cutter.cuts = []
    rows = channel.call(m.Pull([m.TablePull(0, False)], False), [np.array([7], np.int64)])
    assert rows.arrays[0][0, 0] == number + 1
    return number
