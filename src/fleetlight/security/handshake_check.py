# SPDX-License-Identifier: Apache-2.0
"""Whether the files of one folder belong together: both sides meet in memory."""

from __future__ import annotations

import ssl
from pathlib import Path

from fleetlight.errors import ConfigError
from fleetlight.security.certificate_folder import CLIENT, SERVER, CertificateFolder
from fleetlight.security.context import client_context, server_context
from fleetlight.security.tls_errors import BAD_LIST
from fleetlight.strategy.features.ssl import Encryption, as_encryption


def check(said: Encryption | str | Path) -> None:
    """Refuse a folder whose server and client would not take each other, naming the file."""
    client, server = client_context(said), server_context(said)
    folder = Path(as_encryption(said).folder)
    # which names there are is known once somebody is called
    client.check_hostname = False
    to_client, to_server = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = {
        CLIENT: client.wrap_bio(to_client, to_server),
        SERVER: server.wrap_bio(to_server, to_client, server_side=True),
    }
    # a hello, its answer with the server's certificate, the client's
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
    """Of who has not taken the other's certificate."""
    why = getattr(error, "verify_message", None) or error.reason
    if getattr(error, "verify_code", 0) in BAD_LIST:
        return ConfigError(
            f"ssl: {other.crl} is not a valid list of {other.ca}: {why}; {other.list_remedy}"
        )
    return ConfigError(
        f"ssl: {other.certificate} is not one that goes with {other.ca}: {why}; {other.remedy}"
    )
