# SPDX-License-Identifier: Apache-2.0
"""Make the certificates of a job: a CA, one certificate for servers, one for clients.

The CA's key is discarded after signing, so that it cannot be stolen. A new certificate needs a
new CA, and so new certificates for all.
"""

from __future__ import annotations

import datetime
import ipaddress
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fleetlight.errors import ConfigError
from fleetlight.files.atomic import replace_file
from fleetlight.roles.address import own_addresses
from fleetlight.security.certificate_folder import CLIENT, SERVER

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec

_MAX_DAYS = 36_500
#: certificates are valid this long before now, since other machines' clocks may be late
_BEFORE = datetime.timedelta(hours=1)
#: file modes; only the owner may read keys
_FILE, _KEY, _FOLDER = 0o644, 0o600, 0o700


def default_hosts() -> list[str]:
    """The names and addresses of this machine."""
    own = [address for _, address in own_addresses()]
    names = ["localhost", platform.node(), "127.0.0.1", "::1", *own]
    return list(dict.fromkeys(name for name in names if name))


def make(
    folder: str | Path, hosts: Sequence[str] = (), days: int = 365, *, replace: bool = False
) -> list[Path]:
    """Write ca.pem and each side's certificate and key; return the paths.

    `hosts` are names and addresses of further machines that run servers.
    """
    _check_installed()
    if not 0 < days <= _MAX_DAYS:
        raise ConfigError(f"--days: got {days}, expected 1 to {_MAX_DAYS}")
    target = Path(folder)
    named = list(dict.fromkeys([*default_hosts(), *map(_checked_host, hosts)]))
    files = _signed(named, days)
    existing = [name for name in files if (target / name).exists()]
    if existing and not replace:
        raise ConfigError(
            f"{target} already has {', '.join(existing)}; choose another folder, or pass "
            "--replace to replace all of them (running jobs keep the old ones)"
        )
    if (target / "crl.pem").exists():
        raise ConfigError(
            f"{target} has a crl.pem of another CA, which would refuse the new certificates; "
            "remove it first: certificates of the old CA become useless anyway"
        )
    target.mkdir(mode=_FOLDER, parents=True, exist_ok=True)
    for name, data in files.items():
        mode = _KEY if name.endswith(".key") else _FILE
        replace_file(target / name, data, mode=mode, durable=False)
    return [target / name for name in files]


def _check_installed() -> None:
    try:
        import cryptography  # noqa: F401
    except ImportError:
        raise ConfigError(
            "fleetlight cert needs the package cryptography: pip install 'fleetlight[tls]' "
            "(jobs do not need it)"
        ) from None


def _checked_host(host: str) -> str:
    name = host.strip("[]")
    if not name or (any(c in ":/@" or c.isspace() for c in name) and not _address(name)):
        raise ConfigError(f"--host: got {host!r}, expected a host name or an address, no port")
    return name


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def _signed(hosts: Sequence[str], days: int) -> dict[str, bytes]:
    """The contents of the files by name."""
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    ca_key = ec.generate_private_key(ec.SECP256R1())
    authority = _authority(ca_key, days)
    files = {"ca.pem": authority.public_bytes(serialization.Encoding.PEM)}
    for side in (SERVER, CLIENT):
        key = ec.generate_private_key(ec.SECP256R1())
        certificate = _certificate(side, key, authority, ca_key, hosts)
        files[f"{side}.pem"] = certificate.public_bytes(serialization.Encoding.PEM)
        files[f"{side}.key"] = key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    return files


def _authority(key: ec.EllipticCurvePrivateKey, days: int) -> x509.Certificate:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes

    now = datetime.datetime.now(datetime.timezone.utc)
    name = _name("authority")
    return (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _BEFORE)
        .not_valid_after(now + datetime.timedelta(days=days))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs_certificates=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )


def _certificate(
    side: str,
    key: ec.EllipticCurvePrivateKey,
    authority: x509.Certificate,
    ca_key: ec.EllipticCurvePrivateKey,
    hosts: Sequence[str],
) -> x509.Certificate:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.x509.oid import ExtendedKeyUsageOID

    purpose = {SERVER: ExtendedKeyUsageOID.SERVER_AUTH, CLIENT: ExtendedKeyUsageOID.CLIENT_AUTH}
    signer = x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key())
    return (
        x509.CertificateBuilder()
        .subject_name(_name(side))
        .issuer_name(authority.subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(authority.not_valid_before_utc)
        .not_valid_after(authority.not_valid_after_utc)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([purpose[side]]), critical=False)
        .add_extension(_names(hosts), critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(signer, critical=False)
        .sign(ca_key, hashes.SHA256())
    )


def _name(what: str) -> x509.Name:
    from cryptography import x509
    from cryptography.x509.oid import NameOID

    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"fleetlight {what}")])


def _names(hosts: Sequence[str]) -> x509.SubjectAlternativeName:
    from cryptography import x509

    return x509.SubjectAlternativeName(
        [
            x509.IPAddress(address) if (address := _address(host)) else x509.DNSName(host)
            for host in hosts
        ]
    )


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    from cryptography import x509

    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )
