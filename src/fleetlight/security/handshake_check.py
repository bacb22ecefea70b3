# SPDX-License-Identifier: Apache-2.0
"""Check that the files of a folder belong together, by a TLS handshake in memory."""

from __future__ import annotations

import ssl
from pathlib import Path

from fleetlight.errors import ConfigError
from fleetlight.security.certificate_folder import CLIENT, SERVER, CertificateFolder
from fleetlight.security.context import client_context, server_context
from fleetlight.security.tls_errors import BAD_LIST
from fleetlight.strategy.features.ssl import Encryption, as_encryption


def check(said: Encryption | str | Path) -> None:
    """Refuse a folder whose server and client refuse each other; the error names the file."""
    client, server = client_context(said), server_context(said)
    folder = Path(as_encryption(said).folder)
    # the server's host name is known only on a real connection
    client.check_hostname = False
    to_client, to_server = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = {
        CLIENT: client.wrap_bio(to_client, to_server),
        SERVER: server.wrap_bio(to_server, to_client, server_side=True),
    }
    # the client's hello, the server's reply with its certificate, the client's certificate
    for side in (CLIENT, SERVER, CLIENT, SERVER):
        try:
            ends[side].do_handshake()
        except ssl.SSLWantReadError:
            continue
        except ssl.SSLError as error:
            raise _refusal(
                CertificateFolder(folder, SERVER if side == CLIENT else CLIENT), error
            ) from None


def _refusal(other: CertificateFolder, error: ssl.SSLError) -> ConfigError:
    """The error of the side that refused the other's certificate."""
    why = getattr(error, "verify_message", None) or error.reason
    if getattr(error, "verify_code", 0) in BAD_LIST:
        return ConfigError(
            f"ssl: {other.crl} is not a valid revocation list of {other.ca}: {why}; "
            f"{other.list_remedy}"
        )
    return ConfigError(
        f"ssl: {other.certificate} does not belong to {other.ca}: {why}; {other.remedy}"
    )
