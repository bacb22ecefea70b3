# SPDX-License-Identifier: Apache-2.0
"""How the sockets of a job are set up."""

from __future__ import annotations

import socket
import sys

import pytest
from tests.ps.transport.doubles import PULL, Desk, connected, listening

from fleetlight.ps.transport.socket_options import family, is_itself


def test_both_ends_send_at_once_and_notice_a_vanished_peer() -> None:
    with listening(Desk()) as server, connected(server.address) as channel:
        channel.call(PULL)
        assert channel._frames is not None
        (session,) = server._sessions
        for raw in (channel._frames.wire._socket, session._accepted):
            assert raw.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            assert raw.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not let us choose")
def test_the_loopback_gets_a_congestion_control_for_short_roads() -> None:
    with listening(Desk()) as server, connected(server.address) as channel:
        channel.call(PULL)
        assert channel._frames is not None
        (session,) = server._sessions
        for raw in (channel._frames.wire._socket, session._accepted):
            name = raw.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
            assert name.rstrip(b"\0") == b"reno"


def test_a_socket_that_reached_only_itself_is_recognised() -> None:
    with socket.socket() as alone:
        alone.bind(("127.0.0.1", 0))
        alone.connect(alone.getsockname())
        assert is_itself(alone)
    with listening(Desk()) as server, socket.create_connection(server.address) as pair:
        assert not is_itself(pair)


@pytest.mark.parametrize(
    ("host", "expected"), [("10.0.0.1", socket.AF_INET), ("fd00::1", socket.AF_INET6)]
)
def test_families(host: str, expected: socket.AddressFamily) -> None:
    assert family(host) is expected
