# SPDX-License-Identifier: Apache-2.0
"""The folder of certificates that `strategy.ssl` names: its files, each checked by name."""

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

# the logger of `observe`, which lies on the same floor
_logger = logging.getLogger("fleetlight")


@dataclasses.dataclass(frozen=True)
class CertificateFolder:
    """Where the files of one side are."""

    path: Path
    side: str
    #: how early a certificate that expires is worth a warning
    warning_days: int = Encryption.expiry_warning_days

    @property
    def ca(self) -> Path:
        """The certificate that signed all others."""
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
        """The list of certificates that the CA has revoked; it need not be there."""
        return self.path / "crl.pem"

    def check(self) -> None:
        """Refuse a folder with which no connection could come about, naming the file."""
        if not self.path.is_dir():
            raise ConfigError(f"ssl: {self.path} is not a folder; {self.remedy}")
        for file in (self.ca, self.certificate, self.key):
            _read(file, self.remedy)
        lasts = {file: self._checked_last(file) for file in (self.ca, self.certificate)}
        first = min(lasts, key=lambda file: lasts[file])
        if (left := lasts[first] - _now()) < datetime.timedelta(days=self.warning_days):
            _warn_once(
                f"{first} expires on {lasts[first]:%Y-%m-%d}, in {left.days} days; make new ones "
                f"before: fleetlight cert {self.path} --replace, with the --host names of these"
            )
        if mode := self.key.stat().st_mode & 0o077:
            _logger.warning(
                "%s can be read by others (mode %o): chmod 600 %s",
                self.key,
                mode | (self.key.stat().st_mode & 0o700),
                self.key,
            )
        if self.crl.exists():
            self._check_revoked()

    def _check_revoked(self) -> None:
        """Refuse a list that would keep everybody out, and a certificate that is on it."""
        own = ssl.PEM_cert_to_DER_cert(_certificate_of(self.certificate))
        number, issuer = number_and_issuer(own)
        found = next((one for one in self._lists() if one.issuer == issuer), None)
        if found is None:
            raise ConfigError(
                f"ssl: {self.crl} is not of the CA that has signed {self.certificate}; "
                f"{self.list_remedy}"
            )
        now = _now()
        if found.last is not None and now > found.last:
            raise ConfigError(
                f"ssl: {self.crl} was valid until {found.last:%Y-%m-%d %H:%M} UTC, and a list past "
                f"its time keeps everybody out; {self.list_remedy}"
            )
        if now < found.first:
            raise ConfigError(
                f"ssl: {self.crl} is valid from {found.first:%Y-%m-%d %H:%M} UTC on, and the clock "
                f"of this machine says {now:%Y-%m-%d %H:%M} UTC; set the clock"
            )
        if number in found.numbers:
            raise ConfigError(
                f"ssl: {self.certificate} is revoked: {self.crl} has its number {number:x}; give "
                "this machine a certificate that is not"
            )

    def _lists(self) -> list[RevokedList]:
        try:
            return [
                revoked_list(ssl.PEM_cert_to_DER_cert(text.replace(" X509 CRL-", " CERTIFICATE-")))
                for text in _blocks(_read(self.crl, self.list_remedy), "X509 CRL")
            ]
        except (ValueError, IndexError) as error:
            raise ConfigError(
                f"ssl: {self.crl} holds no list of revoked certificates ({error}); "
                f"{self.list_remedy}"
            ) from None

    def _checked_last(self, file: Path) -> datetime.datetime:
        """Until when a certificate is valid, which it must be now."""
        try:
            first, last = validity(ssl.PEM_cert_to_DER_cert(_certificate_of(file)))
        except ValueError as error:
            raise ConfigError(
                f"ssl: {file} holds no certificate ({error}); {self.remedy}"
            ) from None
        now = _now()
        if now > last:
            raise ConfigError(f"ssl: {file} expired on {last:%Y-%m-%d}; {self.remedy}")
        if now < first:
            raise ConfigError(
                f"ssl: {file} is valid from {first:%Y-%m-%d %H:%M} UTC on, and the clock of this "
                f"machine says {now:%Y-%m-%d %H:%M} UTC; set the clock"
            )
        return last

    @property
    def remedy(self) -> str:
        """What to do about a file that is of no use."""
        return f"`fleetlight cert {self.path}` makes all files (--replace: anew)"

    @property
    def list_remedy(self) -> str:
        """What to do about a list of revoked certificates that is of no use."""
        return f"let the CA make a new list (openssl ca -gencrl -out {self.crl}), or remove it"


@functools.cache
def _warn_once(text: str) -> None:
    """A launcher looks at both sides, whose certificates usually end with the same CA."""
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
            f"ssl: {file} cannot be read: {os.strerror(error.errno or 0)}; let the user who runs "
            "the job read it"
        ) from None


def _certificate_of(file: Path) -> str:
    """The first certificate of a PEM file, which may hold words and others after it."""
    return _blocks(_read(file, ""), "CERTIFICATE")[0]


def _blocks(text: str, kind: str) -> list[str]:
    """What a PEM file has of one kind, at least one."""
    begin, end = f"-----BEGIN {kind}-----", f"-----END {kind}-----"
    bodies = [rest.partition(end) for rest in text.split(begin)[1:]]
    if not bodies or not bodies[0][1]:
        raise ValueError(f"there is no {begin}")
    return [begin + body + end for body, found, _ in bodies if found]
