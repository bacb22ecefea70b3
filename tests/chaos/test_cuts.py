# SPDX-License-Identifier: Apache-2.0
"""A connection breaks at every byte of a push, and of its answer: each push counts once."""

from __future__ import annotations

import contextlib
import errno
import socket
from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np
import pytest
from tests.ps.serving import OPTIONS, hello, opened, plan

from fleetlight.ps import messages as m
from fleetlight.ps.transport import Listener, SocketChannel, wire
from fleetlight.ps.transport.interface import Patience


class Scissors:
    """Lets one side send so many bytes more, and then breaks the connection."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._send = wire.Wire._send
        self.side, self.left = "", -1
        #: what each side has sent
        self.sent = {"server": 0, "client": 0}

    def __call__(self, one: wire.Wire, buffers: Sequence[memoryview]) -> int:
        side = "server" if one._socket.getsockname()[1] == self._port else "client"
        size = sum(map(len, buffers))
        if side != self.side or not 0 <= self.left < size:
            if side == self.side and self.left >= 0:
                self.left -= size
            self.sent[side] += size
            return self._send(one, buffers)
        data, self.left, left = b"".join(buffers), -1, self.left
        with contextlib.suppress(OSError):
            one._socket.sendall(data[:left])
            one._socket.shutdown(socket.SHUT_RDWR)
        raise OSError(errno.ECONNRESET, "cut")


@pytest.fixture
def served() -> Iterator[tuple[SocketChannel, int]]:
    server = opened(plan("async", workers=1))
    listener = Listener(("127.0.0.1", 0), server)
    # a worker has several connections, and is there as long as one of them is
    channel, control = (
        SocketChannel.connect(
            listener.address,
            "server 0",
            deadline_s=20.0,
            patience=Patience(10.0),
            greeting=partial(hello, 0, lane, 1),
        )
        for lane in ("push", "control")
    )
    yield channel, listener.address[1]
    channel.close()
    control.close()
    listener.stop()
    server.close()


@pytest.mark.parametrize("side", ["client", "server"])
def test_a_cut_at_any_byte_loses_and_doubles_nothing(
    served: tuple[SocketChannel, int], side: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    channel, port = served
    scissors = Scissors(port)
    monkeypatch.setattr(wire.Wire, "_send", lambda one, buffers: scissors(one, buffers))
    made = 0

    def push() -> None:
        nonlocal made
        message = m.Push(made, 0, 0, made, 0, OPTIONS, [m.TablePush(0)], False)
        gradients = np.full((1, 2), -1, np.float32)
        channel.call(message, [np.array([7], np.int64), gradients])
        made += 1

    push()
    before = scissors.sent[side]
    push()
    size = scissors.sent[side] - before
    assert size > 60
    for at in range(size):
        scissors.side, scissors.left = side, at
        push()
        assert scissors.left == -1
    rows = channel.call(m.Pull([m.TablePull(0, False)], False), [np.array([7], np.int64)])
    assert rows.arrays[0][0, 0] == made == size + 2
