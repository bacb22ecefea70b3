# SPDX-License-Identifier: Apache-2.0
"""Real TLS handshakes in memory."""

import contextlib
import ssl

Ends = dict[str, ssl.SSLObject]


def complete_handshake(
    client: ssl.SSLContext, server: ssl.SSLContext, host: str = "127.0.0.1"
) -> Ends:
    """Completes a handshake; returns both ends."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = {
        "client": client.wrap_bio(to_client, to_server, server_hostname=host),
        "server": server.wrap_bio(to_server, to_client, server_side=True),
    }
    for side in ("client", "server", "client", "server"):
        with contextlib.suppress(ssl.SSLWantReadError):
            ends[side].do_handshake()
    return ends


def failed_handshake(
    client: ssl.SSLContext, server: ssl.SSLContext, host: str = "127.0.0.1"
) -> dict[str, ssl.SSLError]:
    """The error of each side of a failing handshake."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = {
        "client": client.wrap_bio(to_client, to_server, server_hostname=host),
        "server": server.wrap_bio(to_server, to_client, server_side=True),
    }
    errors: dict[str, ssl.SSLError] = {}
    for side in ("client", "server", "client", "server", "client"):
        try:
            # a client learns of a refusal when it reads
            ends[side].do_handshake()
            ends[side].read(1)
        except ssl.SSLWantReadError:
            continue
        except ssl.SSLError as error:
            errors.setdefault(side, error)
    return errors
