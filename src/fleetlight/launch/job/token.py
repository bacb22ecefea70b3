# SPDX-License-Identifier: Apache-2.0
"""The token of a job, from the environment of fleetrun or a file."""

from __future__ import annotations

import os
from collections.abc import Mapping

from fleetlight.errors import ConfigError
from fleetlight.roles.secret import MAX_CHARACTERS, TOKEN_ADVICE, Secret, parse_token

VARIABLE = "FLEET_TOKEN"

#: the warning for a job of several machines without token and certificates
OPEN = (
    "anyone who reaches the ports of this job can join it: give all its machines the same "
    f"{VARIABLE}, or --token_file ({TOKEN_ADVICE}), or --ssl DIR"
)
#: the same for a collective job, which a token does not protect
OPEN_COLLECTIVE = (
    "anyone who reaches the ports of this job can join it: torch's store, Gloo and NCCL have no "
    "authentication; pass --ssl DIR, or use a network of trusted machines (WireGuard, IPsec)"
)


def read_token(file: str | None, environment: Mapping[str, str]) -> Secret | None:
    """The user's token, None if there is none."""
    text = environment.get(VARIABLE, "").strip()
    told = parse_token(text, VARIABLE) if text else None
    if file is None:
        return told
    read = _read(file)
    if told is not None and told != read:
        raise ConfigError(
            f"{VARIABLE} and --token_file {file} have different tokens; unset {VARIABLE} or omit "
            "--token_file"
        )
    return read


def _read(file: str) -> Secret:
    try:
        with open(file, "rb") as opened:
            mode = os.fstat(opened.fileno()).st_mode
            data = opened.read(MAX_CHARACTERS + 2)
    except OSError as error:
        raise ConfigError(
            f"--token_file {file} cannot be read: {error.strerror}; {TOKEN_ADVICE} > {file}"
        ) from None
    if mode & 0o077:
        raise ConfigError(
            f"--token_file {file} is accessible to other users (mode {mode & 0o777:o}); run "
            f"chmod 600 {file}"
        )
    return parse_token(data.decode("ascii", "replace").strip(), f"--token_file {file}")
