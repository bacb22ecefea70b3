# SPDX-License-Identifier: Apache-2.0
"""TLS 1.3 for both sides: each shows a certificate, and each checks the other's."""

from __future__ import annotations

import functools
import platform
import ssl
from pathlib import Path

from fleetlight.errors import ConfigError
from fleetlight.roles.password import PASSWORD, PASSWORD_FILE, key_password
from fleetlight.security.certificate_folder import CLIENT, SERVER, CertificateFolder
from fleetlight.strategy.features.ssl import Encryption, as_encryption


class Contexts:
    """Both sides, for a process that listens and connects; each is read when it is used first."""

    def __init__(self, encryption: Encryption | str | Path) -> None:
        self._encryption = encryption

    @functools.cached_property
    def as_server(self) -> ssl.SSLContext:
        """For the side that listens."""
        return server_context(self._encryption)

    @functools.cached_property
    def as_client(self) -> ssl.SSLContext:
        """For the side that connects."""
        return client_context(self._encryption)


def both_contexts(encryption: Encryption | str | Path | None) -> Contexts | None:
    """Both sides of one folder; None without a folder."""
    return Contexts(encryption) if encryption else None


def server_context(encryption: Encryption | str | Path) -> ssl.SSLContext:
    """For the side that listens: takes only clients whose certificate this CA signed."""
    context = _context(ssl.PROTOCOL_TLS_SERVER, encryption, SERVER)
    # nobody resumes a session here, and unread tickets turn a client's goodbye into a reset
    context.num_tickets = 0
    return context


def client_context(encryption: Encryption | str | Path) -> ssl.SSLContext:
    """For the side that connects: the server's certificate must name the host that was called."""
    return _context(ssl.PROTOCOL_TLS_CLIENT, encryption, CLIENT)


def _context(protocol: ssl._SSLMethod, said: Encryption | str | Path, side: str) -> ssl.SSLContext:
    encryption = as_encryption(said)
    folder = CertificateFolder(Path(encryption.folder), side, encryption.expiry_warning_days)
    folder.check()
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    # OpenSSL then also checks what the other's certificate is for: server or client
    context.verify_mode = ssl.CERT_REQUIRED
    if encryption.ciphers:
        _choose(context, encryption.ciphers)
    _load(context, folder)
    return context


def _choose(context: ssl.SSLContext, ciphers: str) -> None:
    """Of the suites of TLS 1.3, which Python's `set_ciphers` leaves alone."""
    where = f"strategy.ssl_configs.ciphers (--ssl_ciphers) = {ciphers!r}"
    if not hasattr(context, "set_ciphersuites"):
        raise ConfigError(
            f"{where}: Python {platform.python_version()} cannot choose suites of TLS 1.3, 3.15 "
            "and later can; leave it empty and name them in a configuration file of OpenSSL that "
            "OPENSSL_CONF points to (Ciphersuites, in the section system_default), or use Python "
            "3.15"
        )
    known = _suites(context)
    try:
        context.set_ciphersuites(ciphers)
    except ssl.SSLError:
        chosen: list[str] = []
    else:
        chosen = _suites(context)
    # OpenSSL passes over names that it does not know
    if not chosen or (unknown := [name for name in ciphers.split(":") if name not in chosen]):
        raise ConfigError(
            f"{where}: {', '.join(unknown) if chosen else 'it'} names no suite of TLS 1.3 that "
            f"{ssl.OPENSSL_VERSION} has; expected names such as {':'.join(known)}"
        )


def _suites(context: ssl.SSLContext) -> list[str]:
    return [one["name"] for one in context.get_ciphers() if one["protocol"] == "TLSv1.3"]


def _load(context: ssl.SSLContext, folder: CertificateFolder) -> None:
    try:
        context.load_verify_locations(folder.ca)
    except ssl.SSLError as error:
        raise ConfigError(f"ssl: {folder.ca} holds no certificate: {error.reason}") from None
    if folder.crl.exists():
        _load_revoked(context, folder)
    asked: list[str] = []

    def password() -> bytes:
        found = key_password()
        if found is None:
            raise ConfigError(
                f"ssl: {folder.key} is encrypted, and nobody has said its password; set "
                f"{PASSWORD_FILE} to a file that holds it, or {PASSWORD} to the password itself"
            )
        asked.append(found[1])
        return found[0].reveal().encode("utf-8", "surrogateescape")

    try:
        context.load_cert_chain(folder.certificate, folder.key, password)
    except ssl.SSLError as error:
        if asked and error.reason != "KEY_VALUES_MISMATCH":
            raise ConfigError(
                f"ssl: {folder.key} cannot be opened by the password of {asked[0]}; set the one "
                "with which it was encrypted (the keys of both sides have the same)"
            ) from None
        raise ConfigError(
            f"ssl: {folder.certificate} and {folder.key} do not make a pair: {error.reason}"
        ) from None


def _load_revoked(context: ssl.SSLContext, folder: CertificateFolder) -> None:
    """From now on nobody gets in whose certificate is on the list."""
    try:
        context.load_verify_locations(folder.crl)
    except ssl.SSLError as error:
        raise ConfigError(
            f"ssl: {folder.crl} holds no list of revoked certificates: {error.reason}; "
            f"{folder.list_remedy}"
        ) from None
    context.verify_flags |= ssl.VERIFY_CRL_CHECK_LEAF
