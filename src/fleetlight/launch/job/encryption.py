# SPDX-License-Identifier: Apache-2.0
"""A job's certificates and TLS settings, from the flags and variables of fleetrun."""

from __future__ import annotations

import os
from collections.abc import Mapping

from fleetlight.errors import ConfigError
from fleetlight.launch.job.options import LaunchOptions
from fleetlight.strategy.features.ssl import Encryption

MAX_DAYS = 36_500
WARNING_DAYS = "FLEET_SSL_EXPIRY_WARNING_DAYS"


def read_encryption(options: LaunchOptions, environment: Mapping[str, str]) -> Encryption | None:
    """The settings from flags, else from variables; the certificates are checked."""
    days = options.ssl_expiry_warning_days
    if options.ssl is None:
        if days is not None:
            raise ConfigError("--ssl_expiry_warning_days needs --ssl DIR; pass both or neither")
        return None
    from fleetlight.security import handshake_check

    days = _days(environment) if days is None else days
    encryption = Encryption(os.path.abspath(options.ssl), days)
    handshake_check.check(encryption)
    return encryption


def variables(encryption: Encryption | None) -> dict[str, str]:
    """The settings as variables for the processes of the job, without defaults."""
    if encryption is None:
        return {}
    chosen = {"FLEET_SSL": encryption.folder}
    if encryption.expiry_warning_days != Encryption.expiry_warning_days:
        chosen[WARNING_DAYS] = str(encryption.expiry_warning_days)
    return chosen


def without_read(encryption: Encryption | None, environment: Mapping[str, str]) -> dict[str, str]:
    """The environment without the variable that `variables` replaces."""
    return {
        name: value
        for name, value in environment.items()
        if encryption is None or name != WARNING_DAYS
    }


def _days(environment: Mapping[str, str]) -> int:
    text = environment.get(WARNING_DAYS, "").strip()
    if text and not (text.isascii() and text.isdigit() and int(text) <= MAX_DAYS):
        raise ConfigError(f"{WARNING_DAYS}: got {text!r}, expected 0 to {MAX_DAYS} days")
    return int(text) if text else Encryption.expiry_warning_days
