# SPDX-License-Identifier: Apache-2.0
"""A folder with an expired certificate for one side, signed by a CA that is trusted."""

import ssl
from pathlib import Path

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from fleetlight.security.certificates import _authority, _certificate

#: a quarter of an hour ago
_AGO_DAYS = -0.01


def made(folder: Path, expired: str) -> Path:
    """Make a folder in which the certificate of the `expired` side has expired."""
    folder.mkdir()
    ca_key = ec.generate_private_key(ec.SECP256R1())
    pem = serialization.Encoding.PEM
    days = {"server": 365.0, "client": 365.0, expired: _AGO_DAYS}
    (folder / "ca.pem").write_bytes(_authority(ca_key, 365).public_bytes(pem))
    for side, valid in days.items():
        key = ec.generate_private_key(ec.SECP256R1())
        signer = _authority(ca_key, valid)  # type: ignore[arg-type]
        certificate = _certificate(side, key, signer, ca_key, ["127.0.0.1"])
        private = key.private_bytes(
            pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        (folder / f"{side}.pem").write_bytes(certificate.public_bytes(pem))
        (folder / f"{side}.key").write_bytes(private)
    return folder


def context(folder: Path, side: str) -> ssl.SSLContext:
    """A context like Fleetlight's, but without a check of its own certificate."""
    server = side == "server"
    context_ = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
    context_.minimum_version = ssl.TLSVersion.TLSv1_3
    context_.verify_mode = ssl.CERT_REQUIRED
    context_.load_verify_locations(folder / "ca.pem")
    context_.load_cert_chain(folder / f"{side}.pem", folder / f"{side}.key")
    return context_
