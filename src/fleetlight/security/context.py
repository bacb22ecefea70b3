# SPDX-License-Identifier: Apache-2.0
"""TLS 1.3 for both sides: each shows a certificate, and each checks the other's."""

from __future__ import annotations

import dataclasses
import ssl
from pathlib import Path
from typing import NoReturn

from fleetlight.errors import ConfigError
from fleetlight.security.folder import CLIENT, SERVER, Folder


@dataclasses.dataclass(frozen=True)
class Contexts:
    """Both sides, for a process that listens and connects."""

    as_server: ssl.SSLContext
    as_client: ssl.SSLContext


def both_contexts(folder: str | Path | None) -> Contexts | None:
    """Both sides of one folder; None without a folder."""
    if not folder:
        return None
    return Contexts(server_context(folder), client_context(folder))


def server_context(folder: str | Path) -> ssl.SSLContext:
    """For the side that listens: takes only clients whose certificate this CA signed."""
    context = _context(ssl.PROTOCOL_TLS_SERVER, Folder(Path(folder), SERVER))
    # nobody resumes a session here, and unread tickets turn a client's goodbye into a reset
    context.num_tickets = 0
    return context


def client_context(folder: str | Path) -> ssl.SSLContext:
    """For the side that connects: the server's certificate must name the host that was called."""
    return _context(ssl.PROTOCOL_TLS_CLIENT, Folder(Path(folder), CLIENT))


def _context(protocol: ssl._SSLMethod, folder: Folder) -> ssl.SSLContext:
    folder.check()
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    # OpenSSL then also checks what the other's certificate is for: server or client
    context.verify_mode = ssl.CERT_REQUIRED
    _load(context, folder)
    return context


def _load(context: ssl.SSLContext, folder: Folder) -> None:
    def refuse() -> NoReturn:
        raise ConfigError(
            f"ssl: {folder.key} is encrypted, and nobody is there to type its password; give the "
            "key without one (openssl pkey -in OLD -out NEW)"
        )

    try:
        context.load_verify_locations(folder.ca)
    except ssl.SSLError as error:
        raise ConfigError(f"ssl: {folder.ca} holds no certificate: {error.reason}") from None
    try:
        context.load_cert_chain(folder.certificate, folder.key, password=refuse)
    except ssl.SSLError as error:
        raise ConfigError(
            f"ssl: {folder.certificate} and {folder.key} do not make a pair: {error.reason}"
        ) from None
