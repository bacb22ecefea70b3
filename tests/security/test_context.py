# SPDX-License-Identifier: Apache-2.0
"""Both sides show a certificate, and use TLS 1.3 only."""

import logging
import os
import shutil
import ssl
import subprocess
import sys
from pathlib import Path

import pytest
from tests.security.authority import Authority
from tests.security.handshakes import complete_handshake

from fleetlight.errors import ConfigError, StrategyError
from fleetlight.roles.password import PASSWORD, PASSWORD_FILE
from fleetlight.security import context as module
from fleetlight.security.certificates import make
from fleetlight.security.context import client_context, server_context
from fleetlight.security.handshake_check import check
from fleetlight.security.tls_errors import explain
from fleetlight.strategy import DistributedStrategy
from fleetlight.strategy.features.ssl import Encryption, encryption_of


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("certs")
    make(folder)
    return folder


def handshake(client: ssl.SSLContext, server: ssl.SSLContext, host: str) -> ssl.SSLObject:
    """A handshake in memory; returns the server's end."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    client_end = client.wrap_bio(to_client, to_server, server_hostname=host)
    server_end = server.wrap_bio(to_server, to_client, server_side=True)
    unfinished = [client_end, server_end]
    for _ in range(10):
        for side in list(unfinished):
            try:
                side.do_handshake()
                unfinished.remove(side)
            except ssl.SSLWantReadError:
                pass
    assert not unfinished
    return server_end


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "::1"])
def test_both_sides_authenticate_each_other(certificates: Path, host: str) -> None:
    server_end = handshake(client_context(certificates), server_context(certificates), host)
    assert server_end.version() == "TLSv1.3"
    assert (server_end.getpeercert() or {})["subject"] == ((("commonName", "fleetlight client"),),)


def test_another_host_name_is_refused(certificates: Path) -> None:
    with pytest.raises(ssl.SSLCertVerificationError, match="Hostname mismatch"):
        handshake(client_context(certificates), server_context(certificates), "other.host")


@pytest.mark.parametrize("make_context", [client_context, server_context])
def test_both_sides_require_a_certificate(certificates: Path, make_context: object) -> None:
    context = make_context(certificates)  # type: ignore[operator]
    assert context.verify_mode == ssl.CERT_REQUIRED
    assert context.minimum_version == ssl.TLSVersion.TLSv1_3


def test_no_session_is_resumed(certificates: Path) -> None:
    assert server_context(certificates).num_tickets == 0


# -- further TLS settings: key passwords, and expiry warnings


WORDS = "öffne dich"


@pytest.fixture
def encrypted_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with encrypted keys, and an environment without their password."""
    for name in (PASSWORD, PASSWORD_FILE):
        monkeypatch.delenv(name, raising=False)
    return Authority(tmp_path / "locked", WORDS.encode()).folder


def written(file: Path, text: str, mode: int = 0o600) -> str:
    file.write_text(text)
    file.chmod(mode)
    return str(file)


@pytest.mark.parametrize("end", ["", "\n", "\r\n"])
def test_the_password_is_read_from_a_file(
    encrypted_keys: Path, tmp_path: Path, end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(PASSWORD_FILE, written(tmp_path / "words", WORDS + end))
    assert (
        complete_handshake(client_context(encrypted_keys), server_context(encrypted_keys))[
            "client"
        ].version()
        == "TLSv1.3"
    )


def test_password_is_in_a_variable(encrypted_keys: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PASSWORD, WORDS)
    assert (
        complete_handshake(client_context(encrypted_keys), server_context(encrypted_keys))[
            "server"
        ].version()
        == "TLSv1.3"
    )


def test_a_missing_password_is_an_error_without_a_prompt(encrypted_keys: Path) -> None:
    text = rf"client\.key is encrypted and .* {PASSWORD_FILE} to a file .*, or {PASSWORD} to"
    with pytest.raises(ConfigError, match=text):
        client_context(encrypted_keys)


def test_a_wrong_password_is_reported_and_not_shown(
    encrypted_keys: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv(PASSWORD, "sesame")
    with pytest.raises(ConfigError, match=rf"of {PASSWORD} does not decrypt .*server\.key") as e:
        server_context(encrypted_keys)
    monkeypatch.delenv(PASSWORD)
    file = written(tmp_path / "words", "sesame")
    monkeypatch.setenv(PASSWORD_FILE, file)
    with pytest.raises(ConfigError, match=f"the password of .*{file} does not decrypt"):
        server_context(encrypted_keys)
    assert "sesame" not in str(e.value) + caplog.text


def test_a_password_is_read_only_for_an_encrypted_key(
    certificates: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(PASSWORD_FILE, "/nowhere")
    monkeypatch.setattr(module, "key_password", None)
    server_context(certificates)


def test_a_mismatched_key_is_named_despite_a_password(
    encrypted_keys: Path, certificates: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (encrypted_keys / "server.pem").write_bytes((certificates / "server.pem").read_bytes())
    (encrypted_keys / "ca.pem").write_bytes((certificates / "ca.pem").read_bytes())
    monkeypatch.setenv(PASSWORD, WORDS)
    with pytest.raises(ConfigError, match="do not belong together"):
        server_context(encrypted_keys)


CONFIGURED = """
import sys
sys.path.insert(0, sys.argv[2])
from tests.security.handshakes import complete_handshake
from fleetlight.security.context import client_context, server_context
ends = complete_handshake(client_context(sys.argv[1]), server_context(sys.argv[1]))
print(ends["server"].cipher()[0])
"""


def test_the_openssl_configuration_selects_a_suite(certificates: Path, tmp_path: Path) -> None:
    """The error recommends it, and docs/launcher.md shows it."""
    page = (Path(__file__).parents[2] / "docs" / "launcher.md").read_text()
    lines = page.partition("```ini\nopenssl_conf = ")[2].partition("\n```")[0]
    assert lines
    file = tmp_path / "openssl.cnf"
    file.write_text(f"openssl_conf = {lines}\n")
    root = str(Path(__file__).parents[2])
    output = subprocess.run(
        [sys.executable, "-c", CONFIGURED, str(certificates), root],
        env={**os.environ, "OPENSSL_CONF": str(file)},
        capture_output=True,
        check=True,
        text=True,
        timeout=60,
    ).stdout
    assert output.strip() == "TLS_CHACHA20_POLY1305_SHA256"


@pytest.mark.parametrize(("days", "warned"), [(0, 0), (30, 0), (90, 1)])
def test_expiry_warning_days_sets_the_warning(
    tmp_path: Path, days: int, warned: int, caplog: pytest.LogCaptureFixture
) -> None:
    make(tmp_path / "certs", days=60)
    configs = {"expiry_warning_days": days}
    found = encryption_of(DistributedStrategy(ssl=str(tmp_path / "certs"), ssl_configs=configs))
    assert found is not None
    with caplog.at_level(logging.WARNING, "fleetlight"):
        server_context(found)
    assert len(caplog.records) == warned


def test_the_folder_is_made_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert encryption_of(DistributedStrategy(ssl="certs")) == Encryption(str(tmp_path / "certs"))
    assert encryption_of(DistributedStrategy()) is None
    assert encryption_of(DistributedStrategy(ssl="")) is None
    with pytest.raises(StrategyError, match=r"expiry_warning_days: got -1, expected at least 0"):
        DistributedStrategy(ssl_configs={"expiry_warning_days": -1})


# -- errors of OpenSSL become sentences with a remedy; the tests of TLS have real refusals


def error(reason: str) -> ssl.SSLError:
    found = ssl.SSLError(1, f"[SSL: {reason}] (_ssl.c:1)")
    found.reason = reason
    return found


def verification_error(code: int, message: str) -> ssl.SSLCertVerificationError:
    found = ssl.SSLCertVerificationError(1, "certificate verify failed")
    found.verify_code, found.verify_message = code, message
    return found


@pytest.mark.parametrize(
    ("reason", "sentence"),
    [
        ("WRONG_VERSION_NUMBER", "does not use TLS; give --ssl DIR"),
        ("PEER_DID_NOT_RETURN_A_CERTIFICATE", "shows no certificate; give every process"),
        ("TLSV13_ALERT_CERTIFICATE_REQUIRED", "it requires a certificate and got none"),
        ("TLSV1_ALERT_UNKNOWN_CA", "another CA signed it"),
        ("SSLV3_ALERT_CERTIFICATE_EXPIRED", "it has expired"),
        ("TLSV1_ALERT_INTERNAL_ERROR", "this side's certificate: TLSV1_ALERT_INTERNAL_ERROR"),
        ("UNSUPPORTED_PROTOCOL", "does not support TLS 1.3"),
        ("SOMETHING_NEW", "TLS failed: SOMETHING_NEW"),
    ],
)
def test_reasons_are_explained(reason: str, sentence: str) -> None:
    assert sentence in explain(error(reason))


@pytest.mark.parametrize(
    ("code", "sentence"),
    [
        (62, "names other hosts (said); make certificates that name this one: fleetlight cert"),
        (64, "names other hosts"),
        (18, "another CA signed the certificate of the other side (said)"),
        (10, "is not valid now (said); check the clocks"),
        (26, "is made for another purpose (said)"),
        (99, "is not valid: said"),
    ],
)
def test_verification_errors_are_explained(code: int, sentence: str) -> None:
    assert sentence in explain(verification_error(code, "said"))


def test_an_error_without_a_reason_keeps_its_text() -> None:
    assert "odd" in explain(ssl.SSLError("odd"))


# -- the check names a file of a certificate folder that does not belong to the others


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folders = [tmp_path_factory.mktemp("certificates") / name for name in ("ours", "theirs")]
    for folder in folders:
        make(folder)
    return folders


@pytest.fixture
def ours(sets: list[Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(sets[0], tmp_path / "ours"))


def test_files_of_one_set_are_accepted(ours: Path) -> None:
    check(ours)


@pytest.mark.parametrize(
    ("others", "message"),
    [
        (["ca.pem"], "server.pem does not belong to"),
        (["server.pem", "server.key"], "server.pem does not belong to"),
        (["client.pem", "client.key"], "client.pem does not belong to"),
        (["server.key"], "server.key do not belong together"),
        (["client.pem"], "client.key do not belong together"),
    ],
)
def test_a_file_of_another_set_is_named(
    ours: Path, sets: list[Path], others: list[str], message: str
) -> None:
    for name in others:
        shutil.copy(sets[1] / name, ours / name)
    with pytest.raises(ConfigError, match=message):
        check(ours)


def test_a_certificate_for_the_other_side_is_named(ours: Path) -> None:
    for kind in ("pem", "key"):
        shutil.copy(ours / f"client.{kind}", ours / f"server.{kind}")
    with pytest.raises(ConfigError, match=r"server\.pem does not belong .* purpose"):
        check(ours)
