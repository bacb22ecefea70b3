# SPDX-License-Identifier: Apache-2.0
"""An error in a certificate folder names the file."""

import datetime
import logging
import os
from pathlib import Path

import pytest

from fleetlight.errors import ConfigError
from fleetlight.security import certificate_folder as module
from fleetlight.security.certificate_folder import CLIENT, SERVER, CertificateFolder
from fleetlight.security.certificates import make
from fleetlight.security.context import client_context, server_context


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


def test_a_clock_before_the_certificate_is_named(
    certificates: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_clock(monkeypatch, datetime.datetime(2001, 2, 3, tzinfo=datetime.timezone.utc))
    with pytest.raises(ConfigError, match="the clock of this machine shows 2001-02-03"):
        CertificateFolder(certificates, SERVER).check()


def test_a_key_that_others_can_read_is_a_warning(
    certificates: Path, caplog: pytest.LogCaptureFixture
) -> None:
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
