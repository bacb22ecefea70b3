# SPDX-License-Identifier: Apache-2.0
"""A job's certificates and TLS settings, from the flags and variables of fleetrun."""

from __future__ import annotations

import os
from collections.abc import Mapping

from fleetlight.errors import ConfigError
from fleetlight.launch.job.options import LaunchOptions
from fleetlight.strategy.features.ssl import Encryption

MOST_DAYS = 36_500
CIPHERS, WARNING_DAYS = "FLEET_SSL_CIPHERS", "FLEET_SSL_EXPIRY_WARNING_DAYS"


def read_encryption(options: LaunchOptions, environment: Mapping[str, str]) -> Encryption | None:
    """The settings from flags, else from variables; the certificates are checked."""
    if options.ssl is None:
        _refuse_without_folder(options)
        return None
    from fleetlight.security import handshake_check

    days = options.ssl_expiry_warning_days
    encryption = Encryption(
        os.path.abspath(options.ssl),
        options.ssl_ciphers or environment.get(CIPHERS, "").strip(),
        _days(environment) if days is None else days,
    )
    handshake_check.check(encryption)
    return encryption


def variables(encryption: Encryption | None) -> dict[str, str]:
    """The settings as variables for the processes of the job, without defaults."""
    if encryption is None:
        return {}
    chosen = {"FLEET_SSL": encryption.folder}
    if encryption.ciphers:
        chosen[CIPHERS] = encryption.ciphers
    if encryption.expiry_warning_days != Encryption.expiry_warning_days:
        chosen[WARNING_DAYS] = str(encryption.expiry_warning_days)
    return chosen


def without_read(encryption: Encryption | None, environment: Mapping[str, str]) -> dict[str, str]:
    """The environment without the variables that `variables` replaces."""
    read = () if encryption is None else (CIPHERS, WARNING_DAYS)
    return {name: value for name, value in environment.items() if name not in read}


def _refuse_without_folder(options: LaunchOptions) -> None:
    said = {
        "--ssl_ciphers": bool(options.ssl_ciphers),
        "--ssl_expiry_warning_days": options.ssl_expiry_warning_days is not None,
    }
    for flag in (flag for flag, is_said in said.items() if is_said):
        raise ConfigError(f"{flag} needs --ssl DIR; pass both or neither")


def _days(environment: Mapping[str, str]) -> int:
    text = environment.get(WARNING_DAYS, "").strip()
    if text and not (text.isascii() and text.isdigit() and int(text) <= MOST_DAYS):
        raise ConfigError(f"{WARNING_DAYS}: got {text!r}, expected 0 to {MOST_DAYS} days")
    return int(text) if text else Encryption.expiry_warning_days
