# SPDX-License-Identifier: Apache-2.0
"""IncarnationFence: a client of a restarted server never returns to its predecessor."""

from __future__ import annotations

import socket
from collections.abc import Callable

import pytest
from tests.ps.transport.doubles import LIMIT_S, PULL, scripted

from fleetlight.errors import PeerLostError
from fleetlight.ps import messages as m
from fleetlight.ps.transport.channel import SocketChannel, connect_all
from fleetlight.ps.transport.frames import Frames
from fleetlight.ps.transport.interface import RetryPolicy
from fleetlight.ps.worker.connections import IncarnationFence


def test_an_earlier_incarnation_of_a_server_is_refused() -> None:
    fence = IncarnationFence()
    for incarnation in (1, 3, 3):
        fence.check(m.Welcome(0, 0, incarnation))
    with pytest.raises(
        PeerLostError, match="server 0 replies as incarnation 2, but incarnation 3 has"
    ):
        fence.check(m.Welcome(0, 0, 2))
    # each server has its own incarnations, and one that is not open yet reports 0
    fence.check(m.Welcome(1, 0, 1))
    fence.check(m.Welcome(0, 0, 0))


def test_a_repaired_connection_is_to_the_newest_incarnation() -> None:
    served: list[int] = []

    def incarnation(number: int, *, replies: bool) -> Callable[[socket.socket, Frames], None]:
        def act(raw: socket.socket, frames: Frames) -> None:
            hello = frames.receive("a greeting")
            assert hello is not None
            frames.send(hello.request, m.Welcome(0, 0, number), [], "a welcome")
            request = frames.receive("a request")
            if request is not None:
                served.append(number)
            if request is not None and replies:
                frames.send(request.request, m.Pulled(1, 1), [], "a reply")

        return act

    acts = [
        incarnation(2, replies=False),
        incarnation(1, replies=True),
        incarnation(2, replies=True),
    ]
    with scripted(*acts) as address:
        channel = SocketChannel(
            lambda: address,
            "server 0",
            deadline_s=LIMIT_S,
            greeting=lambda: m.Heartbeat(0),
            retry=RetryPolicy(LIMIT_S, restarts=True),
            check=IncarnationFence().check,
        )
        connect_all([channel], LIMIT_S)
        assert channel.call(PULL).message == m.Pulled(1, 1)
        channel.close()
    assert served == [2, 2]
