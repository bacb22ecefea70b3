# SPDX-License-Identifier: Apache-2.0
"""Calling a server that is not there, or no longer."""

from __future__ import annotations

import errno
import socket

import pytest

from fleetlight.ps.transport import dialing as calling


def test_a_server_that_closes_at_once_is_not_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel then knows no peer of the connection that it has just made."""

    def gone(_: socket.socket) -> None:
        raise OSError(errno.ENOTCONN, "Transport endpoint is not connected")

    monkeypatch.setattr(calling, "prepare", gone)
    with socket.create_server(("127.0.0.1", 0)) as server:
        endpoint = server.getsockname()
        with pytest.raises(calling.NotReadyError, match="not connected"):
            calling.dial(endpoint, "server 0", 2.0)


def test_nobody_listens() -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        with pytest.raises(calling.NotReadyError, match="refused"):
            calling.dial(bound.getsockname(), "server 0", 2.0)
