# SPDX-License-Identifier: Apache-2.0
"""An error in a certificate folder names the file."""

import datetime
import logging
import os
import ssl
import stat
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.security.authority import Authority
from tests.security.handshakes import complete_handshake, failed_handshake

from fleetlight.errors import ConfigError
from fleetlight.roles.address import own_addresses
from fleetlight.security import certificate_folder as module
from fleetlight.security.certificate_folder import CLIENT, SERVER, CertificateFolder
from fleetlight.security.certificates import default_hosts, make
from fleetlight.security.context import client_context, server_context
from fleetlight.security.handshake_check import check
from fleetlight.security.tls_errors import explain
from fleetlight.security.x509 import revoked_list, validity

x509 = pytest.importorskip("cryptography.x509")


@pytest.fixture
def certificates(tmp_path: Path) -> Path:
    make(tmp_path / "certs")
    return tmp_path / "certs"


def set_clock(monkeypatch: pytest.MonkeyPatch, time: datetime.datetime) -> None:
    """Sets the clock of this machine."""

    class Clock(datetime.datetime):
        @classmethod
        def now(cls, tz: datetime.tzinfo | None = None) -> datetime.datetime:
            return time

    monkeypatch.setattr(module.datetime, "datetime", Clock)


def test_a_good_folder_logs_nothing(certificates: Path, caplog: pytest.LogCaptureFixture) -> None:
    for side in (SERVER, CLIENT):
        CertificateFolder(certificates, side).check()
    assert caplog.records == []


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere is not a folder; `fleetlight cert "):
        CertificateFolder(tmp_path / "nowhere", SERVER).check()


@pytest.mark.parametrize("name", ["ca.pem", "server.pem", "server.key"])
def test_a_missing_file_is_named(certificates: Path, name: str) -> None:
    (certificates / name).unlink()
    with pytest.raises(ConfigError, match=f"certs/{name} is missing; `fleetlight cert"):
        CertificateFolder(certificates, SERVER).check()


def test_a_side_needs_only_its_own_files(certificates: Path) -> None:
    (certificates / "client.pem").unlink()
    (certificates / "client.key").unlink()
    CertificateFolder(certificates, SERVER).check()


def test_a_file_that_cannot_be_read_is_named(certificates: Path) -> None:
    # root can read every file, but not a folder as a file
    (certificates / "server.key").unlink()
    (certificates / "server.key").mkdir()
    with pytest.raises(ConfigError, match=r"server.key cannot be read: Is a directory"):
        CertificateFolder(certificates, SERVER).check()


@pytest.mark.parametrize("name", ["ca.pem", "server.pem"])
@pytest.mark.parametrize(
    "text", ["", "hello", "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"]
)
def test_a_file_without_a_certificate_is_named(certificates: Path, name: str, text: str) -> None:
    (certificates / name).write_text(text)
    with pytest.raises(ConfigError, match=f"certs/{name} has no certificate"):
        CertificateFolder(certificates, SERVER).check()


def test_text_around_a_certificate_is_ignored(certificates: Path) -> None:
    file = certificates / "ca.pem"
    file.write_text("# our authority\n" + file.read_text() + "# the end\n")
    CertificateFolder(certificates, SERVER).check()


def test_an_expired_certificate_is_named_with_its_date(
    certificates: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = datetime.datetime.now(datetime.timezone.utc)
    set_clock(monkeypatch, now + datetime.timedelta(days=400))
    expected = f"{now + datetime.timedelta(days=365):%Y-%m-%d}"
    with pytest.raises(ConfigError, match=f"ca.pem expired on {expected}; .*--replace"):
        CertificateFolder(certificates, SERVER).check()


@pytest.mark.parametrize(("days", "warned"), [(29, True), (31, False)])
def test_a_certificate_that_expires_soon_is_warned_about(
    days: int, warned: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make(tmp_path / "certs", days=days)
    with caplog.at_level(logging.WARNING, "fleetlight"):
        for side in (SERVER, CLIENT):
            CertificateFolder(tmp_path / "certs", side).check()
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == warned
    last = datetime.datetime.now(datetime.timezone.utc) + datetime.timedelta(days=days)
    for line in lines:
        assert f"ca.pem expires on {last:%Y-%m-%d}, in 28 days; replace it before: " in line
        assert f"fleetlight cert {tmp_path}/certs --replace" in line


def test_the_certificate_that_expires_first_is_named(
    certificates: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make(tmp_path / "short", days=3)
    (tmp_path / "short" / "client.pem").replace(certificates / "client.pem")
    with caplog.at_level(logging.WARNING, "fleetlight"):
        CertificateFolder(certificates, CLIENT).check()
    (record,) = caplog.records
    assert "client.pem expires on" in record.getMessage()


def test_an_early_clock_is_named(certificates: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    set_clock(monkeypatch, datetime.datetime(2001, 2, 3, tzinfo=datetime.timezone.utc))
    with pytest.raises(ConfigError, match="the clock of this machine shows 2001-02-03"):
        CertificateFolder(certificates, SERVER).check()


def test_a_readable_key_is_a_warning(certificates: Path, caplog: pytest.LogCaptureFixture) -> None:
    os.chmod(certificates / "client.key", 0o644)
    with caplog.at_level(logging.WARNING, "fleetlight"):
        CertificateFolder(certificates, CLIENT).check()
    (record,) = caplog.records
    assert "client.key is readable for other users (mode 644); run chmod 600" in record.getMessage()


def test_a_key_of_another_certificate_is_named(certificates: Path) -> None:
    os.replace(certificates / "client.key", certificates / "server.key")
    with pytest.raises(ConfigError, match=r"server.pem and .*server.key do not belong together"):
        server_context(certificates)


def test_an_encrypted_key_is_refused_without_a_prompt(certificates: Path) -> None:
    serialization = pytest.importorskip("cryptography.hazmat.primitives.serialization")
    file = certificates / "client.key"
    key = serialization.load_pem_private_key(file.read_bytes(), None)
    file.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(b"secret"),
        )
    )
    with pytest.raises(ConfigError, match=r"client.key is encrypted"):
        client_context(certificates)


# -- generated certificates are accepted by both sides, and their keys are private


FILES = ["ca.pem", "client.key", "client.pem", "server.key", "server.pem"]


def names(file: Path) -> list[str]:
    certificate = x509.load_pem_x509_certificate(file.read_bytes())
    found = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    hosts = found.get_values_for_type(x509.DNSName)
    return [*hosts, *map(str, found.get_values_for_type(x509.IPAddress))]


def test_files_have_their_names_and_permissions(tmp_path: Path) -> None:
    written = make(tmp_path / "made" / "here")
    assert sorted(path.name for path in written) == FILES
    assert sorted(path.name for path in (tmp_path / "made" / "here").iterdir()) == FILES
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in written}
    assert {name: mode for name, mode in modes.items() if name.endswith("key")} == {
        "client.key": 0o600,
        "server.key": 0o600,
    }


def test_a_server_certificate_names_this_machine_and_given_hosts(tmp_path: Path) -> None:
    make(tmp_path, ["node7.cluster", "10.1.2.3", "[fd00::7]"])
    found = names(tmp_path / "server.pem")
    assert {"localhost", "127.0.0.1", "::1", "node7.cluster", "10.1.2.3", "fd00::7"} <= set(found)
    assert {address for _, address in own_addresses()} <= set(default_hosts())
    assert len(found) == len(set(found))


def test_certificates_are_valid_for_the_given_days(tmp_path: Path) -> None:
    make(tmp_path, days=10)
    for name in ("ca.pem", "server.pem"):
        found = x509.load_pem_x509_certificate((tmp_path / name).read_bytes())
        assert (found.not_valid_after_utc - found.not_valid_before_utc).days == 10


def test_existing_certificates_are_replaced_only_on_demand(tmp_path: Path) -> None:
    make(tmp_path)
    before = (tmp_path / "server.pem").read_bytes()
    with pytest.raises(ConfigError, match=r"already has ca.pem, .*--replace"):
        make(tmp_path)
    assert (tmp_path / "server.pem").read_bytes() == before
    make(tmp_path, replace=True)
    assert (tmp_path / "server.pem").read_bytes() != before


@pytest.mark.parametrize("host", ["a:80", "http://a", "", "a b", "me@a"])
def test_an_invalid_host_is_refused(host: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="expected a host name or an address"):
        make(tmp_path, [host])


@pytest.mark.parametrize("days", [0, -1, 10**9])
def test_an_invalid_number_of_days_is_refused(days: int, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"got {days}, expected 1 to"):
        make(tmp_path, days=days)


def test_missing_library_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cryptography", None)
    with pytest.raises(ConfigError, match=r"pip install 'fleetlight\[tls\]'"):
        make(tmp_path)


# -- certificates on crl.pem are refused; an unusable list is an error that names it


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


# -- the dates of a certificate, parsed without a library


@pytest.mark.parametrize("days", [1, 365, 36_500], ids=["short", "usual", "four-digit years"])
def test_dates_equal_those_of_the_library(days: int, tmp_path: Path) -> None:
    make(tmp_path, days=days)
    for name in ("ca.pem", "server.pem"):
        text = (tmp_path / name).read_text()
        found = x509.load_pem_x509_certificate(text.encode())
        expected = (found.not_valid_before_utc, found.not_valid_after_utc)
        assert validity(ssl.PEM_cert_to_DER_cert(text)) == expected


@given(st.binary(max_size=300))
def test_any_bytes_are_a_certificate_or_refused(data: bytes) -> None:
    try:
        first, last = validity(data)
    except ValueError:
        return
    assert isinstance(first, datetime.datetime)
    assert isinstance(last, datetime.datetime)


def test_a_truncated_certificate_is_refused(tmp_path: Path) -> None:
    make(tmp_path)
    data = ssl.PEM_cert_to_DER_cert((tmp_path / "ca.pem").read_text())
    for length in range(0, len(data), 7):
        with pytest.raises(ValueError, match="its data is"):
            validity(data[:length])
