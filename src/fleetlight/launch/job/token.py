# SPDX-License-Identifier: Apache-2.0
"""The token of a job, as its user says it: in the environment of fleetrun, or in a file."""

from __future__ import annotations

import os
from collections.abc import Mapping

from fleetlight.errors import ConfigError
from fleetlight.roles.secret import MAX_CHARACTERS, TOKEN_ADVICE, Secret, parse_token

VARIABLE = "FLEET_TOKEN"

#: what is said of a job over several machines that has neither token nor certificates
OPEN = (
    "anyone who reaches the ports of this job can join it: give all its machines the same "
    f"{VARIABLE}, or --token_file ({TOKEN_ADVICE}), or --ssl DIR"
)
#: and of one whose traffic is torch's, which neither helps
OPEN_COLLECTIVE = (
    "anyone who reaches the ports of this job can join it: torch's store, Gloo and NCCL check "
    "nobody; give --ssl DIR, or use a network where you trust every machine (WireGuard, IPsec)"
)


def read_token(file: str | None, environment: Mapping[str, str]) -> Secret | None:
    """What the user has given, None if nothing."""
    text = environment.get(VARIABLE, "").strip()
    told = parse_token(text, VARIABLE) if text else None
    if file is None:
        return told
    read = _read(file)
    if told is not None and told != read:
        raise ConfigError(
            f"{VARIABLE} and --token_file {file} hold different tokens; unset {VARIABLE} or leave "
            "--token_file out"
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
            f"--token_file {file} can be read or changed by others (mode {mode & 0o777:o}); "
            f"chmod 600 {file}"
        )
    return parse_token(data.decode("ascii", "replace").strip(), f"--token_file {file}")
