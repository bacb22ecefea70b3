# SPDX-License-Identifier: Apache-2.0
"""The password of keys comes from a variable or a file, never from both."""

import dataclasses
from pathlib import Path

import pytest

import fleetlight
from fleetlight.errors import ConfigError, RoleError
from fleetlight.roles import Role, from_environment
from fleetlight.roles.maker import UserDefinedRoleMaker
from fleetlight.roles.password import PASSWORD, PASSWORD_FILE, key_password
from fleetlight.roles.secret import Secret, parse_token


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


# -- A token comes from the environment in every dialect and is never printed


TOKEN = "correct-horse-battery-staple"

ENVIRONMENTS = {
    "none": {},
    "own": {"FLEET_ROLE": "worker", "FLEET_INDEX": "0", "FLEET_WORKER_NUM": "1"},
    "torchrun": {"RANK": "0", "WORLD_SIZE": "1"},
    "paddle": {"PADDLE_TRAINER_ID": "0", "PADDLE_TRAINERS_NUM": "1"},
    "mindspore": {
        "MS_ROLE": "MS_WORKER",
        "MS_WORKER_NUM": "1",
        "MS_SCHED_HOST": "127.0.0.1",
        "MS_SCHED_PORT": "8118",
    },
}


@pytest.mark.parametrize("dialect", ENVIRONMENTS)
def test_every_dialect_reads_the_token(dialect: str) -> None:
    env = ENVIRONMENTS[dialect]
    assert from_environment(env).token is None
    assert from_environment({**env, "FLEET_TOKEN": ""}).token is None
    assert from_environment({**env, "FLEET_TOKEN": f" {TOKEN}\n"}).token == Secret(TOKEN)


def test_user_defined_role_has_the_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLEET_TOKEN", TOKEN)
    assert UserDefinedRoleMaker().role.token == Secret(TOKEN)


def test_no_text_shows_the_token() -> None:
    role = Role(token=Secret(TOKEN))
    shown = [
        repr(role),
        str(role),
        f"{role.token}",
        f"{role.token!r}",
        str(dataclasses.asdict(role)),
    ]
    assert not [text for text in shown if TOKEN in text]
    assert role.token is not None
    assert role.token.reveal() == TOKEN


def test_only_proofs_and_the_environment_of_children_reveal_it() -> None:
    package = Path(fleetlight.__file__).parent
    revealing = {
        str(path.relative_to(package))
        for path in package.rglob("*.py")
        if ".reveal()" in path.read_text()
    }
    assert revealing == {
        "security/token.py",
        "launch/job/environment.py",
        # a file that only its owner may read, while a job runs that workers may join
        "launch/job/join_point.py",
        # a Secret of the cluster, and the environment of actors' children
        "launch/backends/kubernetes/secrets.py",
        "ray.py",
        # opens a key with its password
        "security/context.py",
    }


@pytest.mark.parametrize(
    "text", ["short", "x" * 1025, "with some blanks in it", "ümläüte-sind-keine"]
)
def test_invalid_token_is_refused_without_being_shown(text: str) -> None:
    with pytest.raises(RoleError, match=r"^FLEET_TOKEN has .*openssl rand -hex 32") as caught:
        from_environment({"FLEET_TOKEN": text})
    assert text not in str(caught.value)


def test_equal_texts_are_equal_secrets() -> None:
    assert parse_token(TOKEN, "here") == Secret(TOKEN)
    assert hash(Secret(TOKEN)) == hash(Secret(TOKEN))
    assert Secret(TOKEN) != Secret(TOKEN + "x")
    assert Secret(TOKEN) != TOKEN
