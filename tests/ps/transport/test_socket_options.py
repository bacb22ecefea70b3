# SPDX-License-Identifier: Apache-2.0
"""Socket options of a job's connections."""

from __future__ import annotations

import socket
import sys

import pytest
from tests.ps.transport.doubles import PULL, RecordingHandler, connected, listening

from fleetlight.ps.transport.socket_options import family, is_itself


def test_both_ends_use_nodelay_and_keepalive() -> None:
    with listening(RecordingHandler()) as server, connected(server.address) as channel:
        channel.call(PULL)
        assert channel._frames is not None
        (session,) = server._sessions
        for raw in (channel._frames.wire._socket, session._accepted):
            assert raw.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            assert raw.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not let us choose")
def test_the_loopback_uses_reno() -> None:
    with listening(RecordingHandler()) as server, connected(server.address) as channel:
        channel.call(PULL)
        assert channel._frames is not None
        (session,) = server._sessions
        for raw in (channel._frames.wire._socket, session._accepted):
            name = raw.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
            assert name.rstrip(b"\0") == b"reno"


def test_a_self_connected_socket_is_detected() -> None:
    with socket.socket() as alone:
        alone.bind(("127.0.0.1", 0))
        alone.connect(alone.getsockname())
        assert is_itself(alone)
    with listening(RecordingHandler()) as server, socket.create_connection(server.address) as pair:
        assert not is_itself(pair)


@pytest.mark.parametrize(
    ("host", "expected"), [("10.0.0.1", socket.AF_INET), ("fd00::1", socket.AF_INET6)]
)
def test_an_address_has_its_family(host: str, expected: socket.AddressFamily) -> None:
    assert family(host) is expected
