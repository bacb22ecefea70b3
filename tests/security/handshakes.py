# SPDX-License-Identifier: Apache-2.0
"""Real handshakes of TLS over memory."""

from __future__ import annotations

import contextlib
import ssl

Ends = dict[str, ssl.SSLObject]


def shaken(client: ssl.SSLContext, server: ssl.SSLContext, host: str = "127.0.0.1") -> Ends:
    """Both ends once the session is open."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = {
        "client": client.wrap_bio(to_client, to_server, server_hostname=host),
        "server": server.wrap_bio(to_server, to_client, server_side=True),
    }
    for side in ("client", "server", "client", "server"):
        with contextlib.suppress(ssl.SSLWantReadError):
            ends[side].do_handshake()
    return ends


def refused(
    client: ssl.SSLContext, server: ssl.SSLContext, host: str = "127.0.0.1"
) -> dict[str, ssl.SSLError]:
    """What each side says of a handshake that fails."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = {
        "client": client.wrap_bio(to_client, to_server, server_hostname=host),
        "server": server.wrap_bio(to_server, to_client, server_side=True),
    }
    said: dict[str, ssl.SSLError] = {}
    for side in ("client", "server", "client", "server", "client"):
        try:
            # a client hears of a refusal when it reads
            ends[side].do_handshake()
            ends[side].read(1)
        except ssl.SSLWantReadError:
            continue
        except ssl.SSLError as error:
            said.setdefault(side, error)
    return said
