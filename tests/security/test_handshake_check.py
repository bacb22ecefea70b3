# SPDX-License-Identifier: Apache-2.0
"""The check names a file of a certificate folder that does not belong to the others."""

import shutil
from pathlib import Path

import pytest

from fleetlight.errors import ConfigError
from fleetlight.security.certificates import make
from fleetlight.security.handshake_check import check


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
