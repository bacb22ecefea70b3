# SPDX-License-Identifier: Apache-2.0
"""Further TLS settings: key passwords, and expiry warnings."""

import logging
from pathlib import Path

import pytest
from tests.security.authority import Authority
from tests.security.handshakes import complete_handshake

from fleetlight.errors import ConfigError, StrategyError
from fleetlight.roles.password import PASSWORD, PASSWORD_FILE
from fleetlight.security import context as module
from fleetlight.security.certificates import make
from fleetlight.security.context import client_context, server_context
from fleetlight.strategy import DistributedStrategy
from fleetlight.strategy.features.ssl import Encryption, encryption_of

WORDS = "öffne dich"


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("certs")
    make(folder)
    return folder


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


def test_the_password_is_read_from_a_variable(
    encrypted_keys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_the_folder_is_resolved_to_an_absolute_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert encryption_of(DistributedStrategy(ssl="certs")) == Encryption(str(tmp_path / "certs"))
    assert encryption_of(DistributedStrategy()) is None
    assert encryption_of(DistributedStrategy(ssl="")) is None
    with pytest.raises(StrategyError, match=r"expiry_warning_days: got -1, expected at least 0"):
        DistributedStrategy(ssl_configs={"expiry_warning_days": -1})
