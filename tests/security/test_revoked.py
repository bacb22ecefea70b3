# SPDX-License-Identifier: Apache-2.0
"""Certificates on crl.pem are refused; an unusable list is an error that names it."""

import ssl
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.security.authority import Authority
from tests.security.handshakes import complete_handshake, failed_handshake

from fleetlight.errors import ConfigError
from fleetlight.security.certificates import make
from fleetlight.security.context import client_context, server_context
from fleetlight.security.handshake_check import check
from fleetlight.security.tls_errors import explain
from fleetlight.security.x509 import revoked_list


@pytest.fixture
def ours(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "certs")


def folder_with_list(authority: Authority, text: str) -> Path:
    (authority.folder / "crl.pem").write_text(text)
    return authority.folder


def test_an_empty_list_refuses_no_certificate(ours: Authority) -> None:
    folder = folder_with_list(ours, ours.revoke())
    check(folder)
    client, server = client_context(folder), server_context(folder)
    assert client.verify_flags & server.verify_flags & ssl.VERIFY_CRL_CHECK_LEAF
    assert complete_handshake(client, server)["server"].version() == "TLSv1.3"


def test_without_a_list_revocation_is_not_checked(ours: Authority) -> None:
    assert not client_context(ours.folder).verify_flags & ssl.VERIFY_CRL_CHECK_LEAF


@pytest.mark.parametrize(
    ("revoked", "by", "code"), [("client", "server", 23), ("server", "client", 23)]
)
def test_a_revoked_peer_is_refused_and_both_sides_explain_it(
    ours: Authority, revoked: str, by: str, code: int
) -> None:
    # the revoked process does not have the list yet
    contexts = {"client": client_context, "server": server_context}
    theirs = contexts[revoked](ours.folder)
    ends = {revoked: theirs, by: contexts[by](folder_with_list(ours, ours.revoke(revoked)))}
    errors = failed_handshake(ends["client"], ends["server"])
    error = errors[by]
    assert isinstance(error, ssl.SSLCertVerificationError)
    assert error.verify_code == code
    assert "is revoked (certificate revoked, by crl.pem); give that process" in explain(error)
    assert "refuses this side's certificate: it is revoked" in explain(errors[revoked])


@pytest.mark.parametrize("side", ["server", "client"])
def test_an_own_revoked_certificate_is_named_at_the_start(ours: Authority, side: str) -> None:
    folder = folder_with_list(ours, ours.revoke(side))
    with pytest.raises(ConfigError, match=rf"{side}\.pem is revoked: .*crl\.pem has its number"):
        check(folder)


@pytest.mark.parametrize(
    ("hours", "text"),
    [
        (
            (-9.0, -1.0),
            r"crl\.pem was valid until .* refuses all connections; let the CA make a new",
        ),
        ((1.0, 9.0), r"crl\.pem is valid from .* on, but the clock of this machine shows"),
    ],
)
def test_a_list_that_is_not_valid_now_is_refused(
    ours: Authority, hours: tuple[float, float], text: str
) -> None:
    folder = folder_with_list(ours, ours.revoke(first_h=hours[0], last_h=hours[1]))
    with pytest.raises(ConfigError, match=text):
        server_context(folder)


def test_a_list_that_expires_later_refuses_with_its_reason(ours: Authority) -> None:
    client = client_context(ours.folder)
    client.load_verify_locations(cadata=None, cafile=str(_late(ours)))
    client.verify_flags |= ssl.VERIFY_CRL_CHECK_LEAF
    error = failed_handshake(client, server_context(ours.folder))["client"]
    assert "crl.pem of this side is no valid revocation list" in explain(error)
    assert "expired" in explain(error)


def _late(authority: Authority) -> Path:
    file = authority.folder / "late.pem"
    file.write_text(authority.revoke(first_h=-9.0, last_h=-1.0))
    return file


def test_a_list_of_another_ca_is_refused(ours: Authority, tmp_path: Path) -> None:
    folder = folder_with_list(ours, Authority(tmp_path / "theirs").revoke())
    # its issuer name is ours; only the signature differs
    error = failed_handshake(client_context(folder), server_context(folder))
    assert any(
        "crl.pem of this side is no valid revocation list" in explain(e) for e in error.values()
    )
    with pytest.raises(ConfigError, match=r"crl\.pem"):
        check(folder)


@pytest.mark.parametrize(
    "text", ["", "hello", "-----BEGIN X509 CRL-----\nAAAA\n-----END X509 CRL-----\n"]
)
def test_a_file_without_a_list_is_refused(ours: Authority, text: str) -> None:
    folder = folder_with_list(ours, text)
    with pytest.raises(ConfigError, match=r"crl\.pem has no revocation list .*let the CA make"):
        server_context(folder)


def test_new_certificates_beside_a_foreign_list_are_refused(ours: Authority) -> None:
    folder = folder_with_list(ours, ours.revoke())
    with pytest.raises(ConfigError, match=r"has a crl\.pem of another CA.* remove it"):
        make(folder, replace=True)


def test_numbers_equal_those_of_the_library(ours: Authority) -> None:
    text = ours.revoke("server", "client")
    found = revoked_list(_der(text))
    read = pytest.importorskip("cryptography.x509").load_pem_x509_crl(text.encode())
    assert found.numbers == {one.serial_number for one in read}
    assert (found.first, found.last) == (read.last_update_utc, read.next_update_utc)
    assert found.issuer in read.issuer.public_bytes()


def _der(text: str) -> bytes:
    return ssl.PEM_cert_to_DER_cert(text.strip().replace("X509 CRL", "CERTIFICATE"))


@given(data=st.binary(max_size=200))
def test_any_bytes_are_parsed_or_refused(data: bytes) -> None:
    try:
        revoked_list(data)
    except (ValueError, IndexError):
        return
