# SPDX-License-Identifier: Apache-2.0
"""The password of encrypted keys: in a variable, or in a file that a variable names.

It is no part of a `Role`: it is read where an encrypted key is loaded, and kept nowhere.
"""

from __future__ import annotations

import os

from fleetlight.errors import ConfigError
from fleetlight.roles.dialect import Environment
from fleetlight.roles.secret import Secret

PASSWORD, PASSWORD_FILE = "FLEET_SSL_PASSWORD", "FLEET_SSL_PASSWORD_FILE"
#: no longer one is taken by OpenSSL
_MOST_BYTES = 1024


def key_password(env: Environment | None = None) -> tuple[Secret, str] | None:
    """The password, and which variable says it; None where neither does."""
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
    if not 1 <= size <= _MOST_BYTES:
        raise ConfigError(
            f"{where}: got a password of {size} bytes, expected 1 to {_MOST_BYTES}; encrypt the "
            "key with such a one (openssl pkey -aes256 -in OLD -out NEW)"
        )
    return Secret(text)


def _read(file: str) -> str:
    """What the file holds, without the end of its line."""
    where = f"{PASSWORD_FILE}={file}"
    try:
        with open(file, "rb") as opened:
            mode = os.fstat(opened.fileno()).st_mode
            data = opened.read(_MOST_BYTES + 3)
    except OSError as error:
        raise ConfigError(
            f"{where} cannot be read: {error.strerror}; give the path of a file that holds the "
            "password and nothing else"
        ) from None
    if mode & 0o077:
        raise ConfigError(
            f"{where} can be read or changed by others (mode {mode & 0o777:o}); chmod 600 {file}"
        )
    text = data.decode("utf-8", "surrogateescape")
    return text.removesuffix("\n").removesuffix("\r")
