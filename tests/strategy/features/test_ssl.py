# SPDX-License-Identifier: Apache-2.0
"""Where encryption takes effect; where it would be missing without notice, it is an error."""

import dataclasses
from typing import Any

import pytest
from tests.errors import refuses
from tests.strategy.test_effects import FOUR, SERVERS, effect

from fleetlight.errors import StrategyError
from fleetlight.strategy import DistributedStrategy, JobFacts


def test_encryption_takes_effect_between_workers_and_servers() -> None:
    assert effect("ssl", SERVERS) == (True, "connections are not encrypted")
    active, why = effect("ssl", SERVERS, ssl="certs")
    assert active
    assert "TLS 1.3" in why
    running = JobFacts(is_collective=False, server_num=1, deadline_s=3.0, ssl="certs")
    assert effect("ssl", running, ssl="certs")[0]
    active, why = effect("ssl", running, ssl="others")
    assert not active
    assert "only when given to fleet.init; in force is 'certs'" in why


def test_encryption_with_nccl_across_hosts_is_refused() -> None:
    one_host = JobFacts(worker_num=4)
    strategy = DistributedStrategy(ssl="certs")
    strategy.check(one_host)
    (sentence,) = strategy.inert(one_host)
    assert "are on one host, where connections are not encrypted" in sentence
    gloo = dataclasses.replace(FOUR, backend="gloo")
    strategy.check(gloo)
    assert not strategy.inert(gloo)
    with refuses(StrategyError, "strategy.ssl", "NCCL", "2 hosts"):
        strategy.check(FOUR)
    DistributedStrategy().check(FOUR)


@pytest.mark.parametrize("is_collective", [True, False])
def test_encryption_set_after_init_is_refused_across_hosts(is_collective: bool) -> None:
    unencrypted = JobFacts(
        is_collective=is_collective, worker_num=2, server_num=1, node_num=2, deadline_s=3.0
    )
    strategy = DistributedStrategy(ssl="certs")
    with refuses(StrategyError, "strategy.ssl", "after fleet.init", "2 hosts"):
        strategy.check(unencrypted)
    DistributedStrategy().check(unencrypted)
    strategy.check(dataclasses.replace(unencrypted, ssl="certs"))
    alone = dataclasses.replace(unencrypted, node_num=1)
    strategy.check(alone)
    assert strategy.inert(alone)


def test_ssl_configs_take_effect_with_certificates() -> None:
    configs = {"expiry_warning_days": 90}
    assert effect("ssl_configs", ssl_configs=configs) == (False, "ssl is off")
    given: dict[str, Any] = {"ssl": "certs", "ssl_configs": configs}
    assert effect("ssl_configs.expiry_warning_days", JobFacts(worker_num=4), **given)[0]
    late = JobFacts(is_collective=False, server_num=1, deadline_s=3.0)
    active, why = effect("ssl_configs", late, **given)
    assert (active, why) == (False, "it takes effect only when given to fleet.init")


def test_encryption_with_nccl_beside_servers_is_refused_across_hosts() -> None:
    job = JobFacts(is_collective=False, worker_num=4, server_num=2, node_num=2)
    strategy = DistributedStrategy(ssl="certs", a_sync=True)
    strategy.check(job)
    strategy.a_sync_configs.dense = "allreduce"
    strategy.check(job)
    with refuses(StrategyError, "NCCL", "WireGuard, IPsec"):
        strategy.check(dataclasses.replace(job, backend="nccl"))
