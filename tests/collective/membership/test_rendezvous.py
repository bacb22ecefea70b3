# SPDX-License-Identifier: Apache-2.0
"""Members join the store, also by a name that resolves to another address on its own machine."""

from __future__ import annotations

import socket

import pytest

from fleetlight.collective.membership.rendezvous import RendezvousDeadline, join, serve
from fleetlight.wire import listening

OUTSIDE = "127.0.0.3"
#: addresses of names; 127.0.0.3 stands for an address that other hosts know
NAMES = {"debian": "127.0.1.1"}


@pytest.mark.parametrize("host", ["debian", "127.0.0.1"])
def test_members_on_the_same_machine_connect_by_name(
    host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def looked_up(endpoint: tuple[str, int], timeout: float) -> socket.socket:
        name, port = endpoint
        return real_connect((NAMES.get(name, name), port), timeout=timeout)

    real_connect, real_check = socket.create_connection, listening.is_loopback
    monkeypatch.setattr(listening, "resolve", lambda host: NAMES.get(host, host))
    monkeypatch.setattr(listening, "is_loopback", lambda a: a != OUTSIDE and real_check(a))
    monkeypatch.setattr(listening, "own_addresses", lambda: (("eth", OUTSIDE),))
    monkeypatch.setattr(socket, "create_connection", looked_up)
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
    served = serve((host, port), RendezvousDeadline(20.0))
    served.set("key", "value")
    assert join((host, port), RendezvousDeadline(20.0), "worker 0").get("key") == b"value"
