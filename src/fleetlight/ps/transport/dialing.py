# SPDX-License-Identifier: Apache-2.0
"""Opens one connection to a server."""

from __future__ import annotations

import contextlib
import socket
import ssl

from fleetlight.errors import DeadlineError
from fleetlight.ps.transport.socket_options import is_itself, prepare
from fleetlight.roles.role import Endpoint
from fleetlight.wire.forking import keep_from_children
from fleetlight.wire.plain import Wire
from fleetlight.wire.tls import TlsWire


class NotReadyError(Exception):
    """No server listens at the endpoint yet."""


def dial(endpoint: Endpoint, peer: str, limit_s: float, tls: ssl.SSLContext | None = None) -> Wire:
    """Open a connection; raise NotReadyError when no server listens yet."""
    try:
        connected = socket.create_connection(endpoint, timeout=limit_s)
    except (OSError, UnicodeError) as error:
        raise NotReadyError(getattr(error, "strerror", None) or str(error)) from None
    with contextlib.ExitStack() as on_failure:
        on_failure.callback(connected.close)
        try:
            if is_itself(connected):
                raise NotReadyError("Connection refused")
            keep_from_children(connected)
            prepare(connected)
        except OSError as error:
            # a server that is shutting down has closed it already
            raise NotReadyError(error.strerror or str(error)) from None
        if tls is None:
            wire = Wire(connected, peer)
        else:
            wire = TlsWire(connected, peer)
            _secure(wire, tls, limit_s, endpoint[0])
        on_failure.pop_all()
    return wire


def _secure(wire: TlsWire, tls: ssl.SSLContext, limit_s: float, host: str) -> None:
    try:
        wire.handshake(tls, limit_s, host)
    except DeadlineError as error:
        # the kernel accepts connections for a server that is too busy to read them
        raise NotReadyError(str(error)) from None
