# SPDX-License-Identifier: Apache-2.0
"""The password of keys comes from a variable or a file, never from both."""

from pathlib import Path

import pytest

from fleetlight.errors import ConfigError
from fleetlight.roles.password import PASSWORD, PASSWORD_FILE, key_password


def words(folder: Path, text: str, mode: int = 0o600) -> dict[str, str]:
    (folder / "words").write_text(text)
    (folder / "words").chmod(mode)
    return {PASSWORD_FILE: str(folder / "words")}


def test_no_password_by_default() -> None:
    assert key_password({}) is None
    assert key_password({PASSWORD: "", PASSWORD_FILE: ""}) is None


def test_password_keeps_blanks_but_not_the_newline(tmp_path: Path) -> None:
    found = key_password(words(tmp_path, " a b \n"))
    assert found is not None
    assert found[0].reveal() == " a b "
    password = key_password({PASSWORD: " a b "})
    assert password is not None
    assert (password[0].reveal(), password[1]) == (" a b ", PASSWORD)
    assert "a b" not in f"{password!r} {password}"


def test_variable_and_file_together_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="are both set, expected one of them"):
        key_password({PASSWORD: "a", **words(tmp_path, "a")})


def test_file_readable_by_others_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"to other users \(mode 640\); run chmod 600 .*/words"):
        key_password(words(tmp_path, "a", 0o640))


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"FILE=.*/none cannot be read: No such file .*; give"):
        key_password({PASSWORD_FILE: str(tmp_path / "none")})


@pytest.mark.parametrize(("text", "size"), [("\n", 0), ("é" * 513, 1026)])
def test_empty_or_too_long_password_is_refused(tmp_path: Path, text: str, size: int) -> None:
    with pytest.raises(ConfigError, match=f"got a password of {size} bytes, expected 1 to 1024"):
        key_password(words(tmp_path, text))
