# SPDX-License-Identifier: Apache-2.0
"""Generated certificates are accepted by both sides, and their keys are private."""

import stat
import sys
from pathlib import Path

import pytest

from fleetlight.errors import ConfigError
from fleetlight.roles.address import own_addresses
from fleetlight.security.certificates import default_hosts, make

x509 = pytest.importorskip("cryptography.x509")
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


def test_a_missing_library_is_an_error_with_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "cryptography", None)
    with pytest.raises(ConfigError, match=r"pip install 'fleetlight\[tls\]'"):
        make(tmp_path)
