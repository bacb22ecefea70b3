# SPDX-License-Identifier: Apache-2.0
"""dial: a server that is not listening, or not any more."""

from __future__ import annotations

import errno
import socket

import pytest

from fleetlight.ps.transport import dialing


def test_a_server_that_closes_at_once_is_not_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel then reports no peer for the new connection."""

    def not_connected(_: socket.socket) -> None:
        raise OSError(errno.ENOTCONN, "Transport endpoint is not connected")

    monkeypatch.setattr(dialing, "prepare", not_connected)
    with socket.create_server(("127.0.0.1", 0)) as server:
        endpoint = server.getsockname()
        with pytest.raises(dialing.NotReadyError, match="not connected"):
            dialing.dial(endpoint, "server 0", 2.0)


def test_a_refused_connection_is_not_ready() -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        with pytest.raises(dialing.NotReadyError, match="refused"):
            dialing.dial(bound.getsockname(), "server 0", 2.0)
