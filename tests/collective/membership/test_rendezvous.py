# SPDX-License-Identifier: Apache-2.0
"""Members join the store, also by a name that resolves to another address on its own machine."""

import socket
from pathlib import Path
from typing import Any

import pytest
from tests.workers import reserved_port

from fleetlight.collective.membership import rendezvous
from fleetlight.collective.membership.rendezvous import (
    RendezvousDeadline,
    close_tunnels,
    join,
    serve,
)
from fleetlight.errors import DeadlineError
from fleetlight.security.certificates import make
from fleetlight.security.context import Contexts
from fleetlight.wire import listening
from fleetlight.wire.tls import TlsWire

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


def test_a_handshake_with_a_busy_host_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries: list[int] = []

    class BusyWire(TlsWire):
        """A wire whose first handshakes take too long."""

        def handshake(self, *given: Any) -> None:
            tries.append(1)
            if len(tries) <= 2:
                raise DeadlineError("worker 0 was silent for 5.0 s during the TLS handshake")
            super().handshake(*given)

    monkeypatch.setattr(rendezvous, "TlsWire", BusyWire)
    make(tmp_path)
    tls, deadline = Contexts(tmp_path), RendezvousDeadline(20.0)
    holder, port = reserved_port()
    endpoint = ("127.0.0.1", port)
    served = serve(endpoint, deadline, tls)
    try:
        served.set("key", "value")
        assert join(endpoint, deadline, "worker 0", tls).get("key") == b"value"
    finally:
        close_tunnels()
        holder.close()
    assert len(tries) == 3
