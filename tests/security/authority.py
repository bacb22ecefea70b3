# SPDX-License-Identifier: Apache-2.0
"""A CA that keeps its key, like a user's own CA, and can revoke certificates."""

import datetime
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from fleetlight.security.certificates import _authority, _certificate

PEM = serialization.Encoding.PEM


class Authority:
    """Creates a folder as `fleetlight cert` does, and revocation lists for it."""

    def __init__(self, folder: Path, password: bytes = b"") -> None:
        folder.mkdir()
        self.folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._certificate = _authority(self._key, 365)
        self._signed: dict[str, x509.Certificate] = {}
        (folder / "ca.pem").write_bytes(self._certificate.public_bytes(PEM))
        for side in ("server", "client"):
            self._sign(side, password)

    def _sign(self, side: str, password: bytes) -> None:
        key = ec.generate_private_key(ec.SECP256R1())
        signed = _certificate(side, key, self._certificate, self._key, ["127.0.0.1"])
        hidden: serialization.KeySerializationEncryption = serialization.NoEncryption()
        if password:
            hidden = serialization.BestAvailableEncryption(password)
        private = key.private_bytes(PEM, serialization.PrivateFormat.PKCS8, hidden)
        (self.folder / f"{side}.pem").write_bytes(signed.public_bytes(PEM))
        (self.folder / f"{side}.key").write_bytes(private)
        (self.folder / f"{side}.key").chmod(0o600)
        self._signed[side] = signed

    def revoke(self, *sides: str, first_h: float = -1, last_h: float = 24) -> str:
        """A revocation list for these certificates, valid between two hours relative to now."""
        now = datetime.datetime.now(datetime.timezone.utc)
        builder = (
            x509.CertificateRevocationListBuilder()
            .issuer_name(self._certificate.subject)
            .last_update(now + datetime.timedelta(hours=first_h))
            .next_update(now + datetime.timedelta(hours=last_h))
        )
        for side in sides:
            number = self._signed[side].serial_number
            entry = x509.RevokedCertificateBuilder().serial_number(number).revocation_date(now)
            builder = builder.add_revoked_certificate(entry.build())
        return builder.sign(self._key, hashes.SHA256()).public_bytes(PEM).decode()
