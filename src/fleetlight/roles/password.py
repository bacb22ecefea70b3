# SPDX-License-Identifier: Apache-2.0
"""The password of encrypted keys, from a variable or from a file that a variable names.

It is read when an encrypted key is loaded, and is not stored in the `Role`.
"""

from __future__ import annotations

import os

from fleetlight.errors import ConfigError
from fleetlight.roles.dialect import Environment
from fleetlight.roles.secret import Secret

PASSWORD, PASSWORD_FILE = "FLEET_SSL_PASSWORD", "FLEET_SSL_PASSWORD_FILE"
#: the longest password that OpenSSL accepts
_MAX_BYTES = 1024


def key_password(env: Environment | None = None) -> tuple[Secret, str] | None:
    """The password and the name of its variable, None if neither variable is set."""
    env = os.environ if env is None else env
    text, file = env.get(PASSWORD), env.get(PASSWORD_FILE)
    if text and file:
        raise ConfigError(
            f"{PASSWORD} and {PASSWORD_FILE} are both set, expected one of them; unset the other"
        )
    if file:
        return _checked(_read(file), f"{PASSWORD_FILE}={file}"), f"{PASSWORD_FILE}={file}"
    return (_checked(text, PASSWORD), PASSWORD) if text else None


def _checked(text: str, where: str) -> Secret:
    size = len(text.encode("utf-8", "surrogateescape"))
    if not 1 <= size <= _MAX_BYTES:
        raise ConfigError(
            f"{where}: got a password of {size} bytes, expected 1 to {_MAX_BYTES}; encrypt the "
            "key with another one (openssl pkey -aes256 -in OLD -out NEW)"
        )
    return Secret(text)


def _read(file: str) -> str:
    """The content of the file without the final newline."""
    where = f"{PASSWORD_FILE}={file}"
    try:
        with open(file, "rb") as opened:
            mode = os.fstat(opened.fileno()).st_mode
            data = opened.read(_MAX_BYTES + 3)
    except OSError as error:
        raise ConfigError(
            f"{where} cannot be read: {error.strerror}; give the path of a file with only the "
            "password"
        ) from None
    if mode & 0o077:
        raise ConfigError(
            f"{where} is accessible to other users (mode {mode & 0o777:o}); run chmod 600 {file}"
        )
    text = data.decode("utf-8", "surrogateescape")
    return text.removesuffix("\n").removesuffix("\r")
