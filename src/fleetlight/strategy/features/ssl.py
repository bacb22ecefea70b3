# SPDX-License-Identifier: Apache-2.0
"""TLS for all ports of the job."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import ClassVar

from fleetlight.errors import StrategyError
from fleetlight.strategy.config_dicts import SslConfigsDict
from fleetlight.strategy.feature import Checks, Feature
from fleetlight.strategy.features.reduction.data_parallel import all_reduces
from fleetlight.strategy.job import JobFacts
from fleetlight.strategy.settings import Effect, Nested, Settings, nested, setting, settings_class


def _check_encrypted(strategy: SslFeature, job: JobFacts) -> None:
    """Refuse a job that would silently send unencrypted data in spite of `ssl`."""
    reduces = all_reduces(strategy, job) and job.backend == "nccl"
    if strategy.ssl and reduces and job.worker_num > 1 and job.node_num > 1:
        raise StrategyError(
            f"strategy.ssl = {strategy.ssl!r}: the workers of this job all-reduce by NCCL across "
            f"{job.node_num} hosts, and NCCL cannot encrypt; leave ssl out and put the hosts into "
            "an encrypted network (WireGuard, IPsec), or train on CPUs"
        )
    if strategy.ssl and job.deadline_s is not None and job.ssl is None and job.node_num > 1:
        raise StrategyError(
            f"strategy.ssl = {strategy.ssl!r} was set after fleet.init, when the connections "
            f"between {job.node_num} hosts were open and not encrypted; give the strategy to "
            "fleet.init(strategy=...), or start the job with fleetrun --ssl"
        )


def _ssl(strategy: SslFeature, job: JobFacts) -> Effect:
    if not strategy.ssl:
        return True, "connections are not encrypted"
    if job.is_collective and job.node_num == 1:
        return False, _ON_THIS_HOST
    if job.deadline_s is not None and job.ssl != strategy.ssl:
        force = f"in force is {job.ssl!r}" if job.ssl else "connections are not encrypted"
        return False, f"it takes effect only when given to fleet.init; {force}"
    if job.is_collective:
        return True, "TLS 1.3 between workers of different hosts; both sides show a certificate"
    return True, "TLS 1.3 between workers and servers; both sides show a certificate"


def _ssl_configs(strategy: SslFeature, job: JobFacts) -> Effect:
    if not strategy.ssl:
        return False, "ssl is off"
    if job.deadline_s is not None and job.ssl is None:
        return False, "it takes effect only when given to fleet.init"
    # certificates are checked even if no data leaves the host
    return True, "settings for the certificates in ssl"


_ON_THIS_HOST = "the workers are on one host, where connections are not encrypted"


@settings_class
class SslConfigs(Settings):
    """Further settings of TLS.

    Example:
        >>> strategy = fleet.DistributedStrategy(ssl="certificates")
        >>> strategy.ssl_configs.expiry_warning_days = 14
    """

    expiry_warning_days: int = setting(
        30,
        "how many days before its expiry to warn about a certificate",
        variable="FLEET_SSL_EXPIRY_WARNING_DAYS",
        minimum=0,
        maximum=36500,
    )


@settings_class
class SslFeature(Feature):
    """Certificates and further settings of TLS."""

    CHECKS: ClassVar[Checks] = (_check_encrypted,)

    ssl: str | None = setting(
        None,
        "folder of certificates for all ports",
        effect=_ssl,
        variable="FLEET_SSL",
        kind=str,
        optional=True,
    )
    ssl_configs: Nested[SslConfigs, SslConfigsDict] = nested(
        SslConfigs, "when to warn of expiry", effect=_ssl_configs
    )


@dataclasses.dataclass(frozen=True)
class Encryption:
    """A job's certificates and TLS settings, from `strategy.ssl` and `strategy.ssl_configs`."""

    #: the folder of the certificates
    folder: str
    #: how many days before its expiry to warn about a certificate
    expiry_warning_days: int = SslConfigs().expiry_warning_days


def as_encryption(encryption: Encryption | str | Path) -> Encryption:
    """`said`, or a folder with default settings."""
    return encryption if isinstance(encryption, Encryption) else Encryption(str(encryption))


def encryption_of(strategy: SslFeature) -> Encryption | None:
    """The encryption of a strategy, None without a folder of certificates."""
    if not strategy.ssl:
        return None
    configs = strategy.ssl_configs
    return Encryption(os.path.abspath(strategy.ssl), configs.expiry_warning_days)
