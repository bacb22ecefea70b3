# SPDX-License-Identifier: Apache-2.0
"""`Encryption`: the certificates of a job, and what is asked of TLS beside them."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

from fleetlight.strategy import DistributedStrategy, SslConfigs


@dataclasses.dataclass(frozen=True)
class Encryption:
    """What `strategy.ssl` and `strategy.ssl_configs` say."""

    #: of the certificates
    folder: str
    #: the suites of TLS 1.3 to choose from, as 'A:B'; '': OpenSSL's own choice
    ciphers: str = ""
    #: how early a certificate that expires is worth a warning
    expiry_warning_days: int = SslConfigs().expiry_warning_days


def as_encryption(said: Encryption | str | Path) -> Encryption:
    """A folder by itself asks for nothing beside it."""
    return said if isinstance(said, Encryption) else Encryption(str(said))


def encryption_of(strategy: DistributedStrategy) -> Encryption | None:
    """What a strategy asks for; None where it has no folder of certificates."""
    if not strategy.ssl:
        return None
    configs = strategy.ssl_configs
    return Encryption(os.path.abspath(strategy.ssl), configs.ciphers, configs.expiry_warning_days)
