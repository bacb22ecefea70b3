# SPDX-License-Identifier: Apache-2.0
"""TLS 1.3 contexts for both sides, which check each other's certificates."""

from __future__ import annotations

import functools
import ssl
from pathlib import Path

from fleetlight.errors import ConfigError
from fleetlight.roles.password import PASSWORD, PASSWORD_FILE, key_password
from fleetlight.security.certificate_folder import CLIENT, SERVER, CertificateFolder
from fleetlight.strategy.features.ssl import Encryption, as_encryption


class Contexts:
    """The contexts of both sides, each loaded on first use."""

    def __init__(self, encryption: Encryption | str | Path) -> None:
        self._encryption = encryption

    @functools.cached_property
    def as_server(self) -> ssl.SSLContext:
        """The context for the side that listens."""
        return server_context(self._encryption)

    @functools.cached_property
    def as_client(self) -> ssl.SSLContext:
        """The context for the side that connects."""
        return client_context(self._encryption)


def both_contexts(encryption: Encryption | str | Path | None) -> Contexts | None:
    """The contexts of one folder, None without a folder."""
    return Contexts(encryption) if encryption else None


def server_context(encryption: Encryption | str | Path) -> ssl.SSLContext:
    """The context for the side that listens; it accepts clients with a certificate of this CA."""
    context = _context(ssl.PROTOCOL_TLS_SERVER, encryption, SERVER)
    # sessions are not resumed, and unread tickets would turn a client's close into a reset
    context.num_tickets = 0
    return context


def client_context(encryption: Encryption | str | Path) -> ssl.SSLContext:
    """The context for the side that connects; the server's certificate must name its host."""
    return _context(ssl.PROTOCOL_TLS_CLIENT, encryption, CLIENT)


def _context(
    protocol: ssl._SSLMethod, encryption: Encryption | str | Path, side: str
) -> ssl.SSLContext:
    encryption = as_encryption(encryption)
    folder = CertificateFolder(Path(encryption.folder), side, encryption.expiry_warning_days)
    folder.check()
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    # OpenSSL then also checks the purpose of the other's certificate
    context.verify_mode = ssl.CERT_REQUIRED
    _load(context, folder)
    return context


def _load(context: ssl.SSLContext, folder: CertificateFolder) -> None:
    try:
        context.load_verify_locations(folder.ca)
    except ssl.SSLError as error:
        raise ConfigError(f"ssl: {folder.ca} has no certificate: {error.reason}") from None
    if folder.crl.exists():
        _load_revoked(context, folder)
    sources: list[str] = []

    def password() -> bytes:
        found = key_password()
        if found is None:
            raise ConfigError(
                f"ssl: {folder.key} is encrypted and its password is not set; set "
                f"{PASSWORD_FILE} to a file with it, or {PASSWORD} to the password"
            )
        sources.append(found[1])
        return found[0].reveal().encode("utf-8", "surrogateescape")

    try:
        context.load_cert_chain(folder.certificate, folder.key, password)
    except ssl.SSLError as error:
        if sources and error.reason != "KEY_VALUES_MISMATCH":
            raise ConfigError(
                f"ssl: the password of {sources[0]} does not decrypt {folder.key}; set the "
                "password with which the keys of both sides are encrypted"
            ) from None
        raise ConfigError(
            f"ssl: {folder.certificate} and {folder.key} do not belong together: {error.reason}"
        ) from None


def _load_revoked(context: ssl.SSLContext, folder: CertificateFolder) -> None:
    """Let the context refuse certificates on the revocation list."""
    try:
        context.load_verify_locations(folder.crl)
    except ssl.SSLError as error:
        raise ConfigError(
            f"ssl: {folder.crl} has no revocation list: {error.reason}; {folder.list_remedy}"
        ) from None
    context.verify_flags |= ssl.VERIFY_CRL_CHECK_LEAF
