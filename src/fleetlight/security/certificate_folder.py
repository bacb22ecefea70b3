# SPDX-License-Identifier: Apache-2.0
"""The folder of certificates that `strategy.ssl` names, and the checks of its files."""

from __future__ import annotations

import dataclasses
import datetime
import functools
import logging
import os
import ssl
from pathlib import Path

from fleetlight.errors import ConfigError
from fleetlight.security.x509 import RevokedList, number_and_issuer, revoked_list, validity
from fleetlight.strategy.features.ssl import Encryption

SERVER, CLIENT = "server", "client"

# the logger of `observe`, which this layer must not import
_logger = logging.getLogger("fleetlight")


@dataclasses.dataclass(frozen=True)
class CertificateFolder:
    """The files of one side, server or client."""

    path: Path
    side: str
    #: how many days before its expiry to warn about a certificate
    warning_days: int = Encryption.expiry_warning_days

    @property
    def ca(self) -> Path:
        """The certificate of the CA, which signed the others."""
        return self.path / "ca.pem"

    @property
    def certificate(self) -> Path:
        """This side's certificate."""
        return self.path / f"{self.side}.pem"

    @property
    def key(self) -> Path:
        """The key of this side's certificate."""
        return self.path / f"{self.side}.key"

    @property
    def crl(self) -> Path:
        """The optional revocation list of the CA."""
        return self.path / "crl.pem"

    def check(self) -> None:
        """Refuse a folder that allows no connection, with an error that names the file."""
        if not self.path.is_dir():
            raise ConfigError(f"ssl: {self.path} is not a folder; {self.remedy}")
        for file in (self.ca, self.certificate, self.key):
            _read(file, self.remedy)
        lasts = {file: self._checked_last(file) for file in (self.ca, self.certificate)}
        first = min(lasts, key=lambda file: lasts[file])
        if (left := lasts[first] - _now()) < datetime.timedelta(days=self.warning_days):
            _warn_once(
                f"{first} expires on {lasts[first]:%Y-%m-%d}, in {left.days} days; replace it "
                f"before: fleetlight cert {self.path} --replace, with the same --host names"
            )
        if mode := self.key.stat().st_mode & 0o077:
            _logger.warning(
                "%s is readable for other users (mode %o); run chmod 600 %s",
                self.key,
                mode | (self.key.stat().st_mode & 0o700),
                self.key,
            )
        if self.crl.exists():
            self._check_revoked()

    def _check_revoked(self) -> None:
        """Refuse a revocation list that is not valid now, and a certificate that is on it."""
        own = ssl.PEM_cert_to_DER_cert(_certificate_of(self.certificate))
        number, issuer = number_and_issuer(own)
        found = next((one for one in self._lists() if one.issuer == issuer), None)
        if found is None:
            raise ConfigError(
                f"ssl: {self.crl} is not from the CA that signed {self.certificate}; "
                f"{self.list_remedy}"
            )
        now = _now()
        if found.last is not None and now > found.last:
            raise ConfigError(
                f"ssl: {self.crl} was valid until {found.last:%Y-%m-%d %H:%M} UTC, and an expired "
                f"list refuses all connections; {self.list_remedy}"
            )
        if now < found.first:
            raise ConfigError(
                f"ssl: {self.crl} is valid from {found.first:%Y-%m-%d %H:%M} UTC on, but the clock "
                f"of this machine shows {now:%Y-%m-%d %H:%M} UTC; set the clock"
            )
        if number in found.numbers:
            raise ConfigError(
                f"ssl: {self.certificate} is revoked: {self.crl} has its number {number:x}; give "
                "this machine another certificate"
            )

    def _lists(self) -> list[RevokedList]:
        try:
            return [
                revoked_list(ssl.PEM_cert_to_DER_cert(text.replace(" X509 CRL-", " CERTIFICATE-")))
                for text in _blocks(_read(self.crl, self.list_remedy), "X509 CRL")
            ]
        except (ValueError, IndexError) as error:
            raise ConfigError(
                f"ssl: {self.crl} has no revocation list ({error}); {self.list_remedy}"
            ) from None

    def _checked_last(self, file: Path) -> datetime.datetime:
        """The last moment of a certificate, which must be valid now."""
        try:
            first, last = validity(ssl.PEM_cert_to_DER_cert(_certificate_of(file)))
        except ValueError as error:
            raise ConfigError(f"ssl: {file} has no certificate ({error}); {self.remedy}") from None
        now = _now()
        if now > last:
            raise ConfigError(f"ssl: {file} expired on {last:%Y-%m-%d}; {self.remedy}")
        if now < first:
            raise ConfigError(
                f"ssl: {file} is valid from {first:%Y-%m-%d %H:%M} UTC on, but the clock of this "
                f"machine shows {now:%Y-%m-%d %H:%M} UTC; set the clock"
            )
        return last

    @property
    def remedy(self) -> str:
        """What to do about an invalid file."""
        return f"`fleetlight cert {self.path}` makes all files (--replace replaces them)"

    @property
    def list_remedy(self) -> str:
        """What to do about an invalid revocation list."""
        return f"let the CA make a new list (openssl ca -gencrl -out {self.crl}), or remove it"


@functools.cache
def _warn_once(text: str) -> None:
    """Warn once, since a launcher checks both sides, which have the same CA."""
    _logger.warning("%s", text)


def _now() -> datetime.datetime:
    return datetime.datetime.now(datetime.timezone.utc)


def _read(file: Path, remedy: str) -> str:
    try:
        return file.read_text(encoding="ascii", errors="replace")
    except FileNotFoundError:
        raise ConfigError(f"ssl: {file} is missing; {remedy}") from None
    except OSError as error:
        raise ConfigError(
            f"ssl: {file} cannot be read: {os.strerror(error.errno or 0)}; make it readable for "
            "the user who runs the job"
        ) from None


def _certificate_of(file: Path) -> str:
    """The first certificate of a PEM file, which may have other text and certificates."""
    return _blocks(_read(file, ""), "CERTIFICATE")[0]


def _blocks(text: str, kind: str) -> list[str]:
    """The blocks of one kind in a PEM file, at least one."""
    begin, end = f"-----BEGIN {kind}-----", f"-----END {kind}-----"
    bodies = [rest.partition(end) for rest in text.split(begin)[1:]]
    if not bodies or not bodies[0][1]:
        raise ValueError(f"there is no {begin}")
    return [begin + body + end for body, found, _ in bodies if found]
