# SPDX-License-Identifier: Apache-2.0
"""Training modes with parameter servers: sync, async, bounded staleness, GeoSGD."""

from __future__ import annotations

from collections.abc import Callable

from fleetlight.errors import counted
from fleetlight.strategy.config_dicts import ASyncConfigsDict
from fleetlight.strategy.feature import Feature
from fleetlight.strategy.job import JobFacts
from fleetlight.strategy.settings import (
    Effect,
    EffectRule,
    Nested,
    Settings,
    nested,
    setting,
    settings_class,
)

NO_SERVERS = "a collective job has no parameter servers"


def _in_async(rule: Callable[[ASyncFeature], Effect]) -> EffectRule:
    """A rule of the asynchronous modes other than GeoSGD."""

    def both(strategy: ASyncFeature, job: JobFacts) -> Effect:
        if not strategy.a_sync:
            return False, "a_sync is off, and in sync mode each step is one push"
        if strategy.a_sync_configs.k_steps:
            return False, "k_steps makes it GeoSGD, whose workers exchange every k steps only"
        return rule(strategy)

    return both


def _k_steps(strategy: ASyncFeature, job: JobFacts) -> Effect:
    k = strategy.a_sync_configs.k_steps
    if not strategy.a_sync:
        return False, "a_sync is off: workers and servers exchange at every step"
    if k == 0:
        return True, "workers and servers exchange at every step"
    return True, f"GeoSGD: workers and servers exchange every {counted(k, 'step')}"


def _staleness(strategy: ASyncFeature) -> Effect:
    bound = strategy.a_sync_configs.staleness
    if bound is None:
        return True, "no bound on how far a worker may be ahead of the slowest"
    return True, f"no worker gets more than {counted(bound, 'step')} ahead of the slowest"


def _send_queue_size(strategy: ASyncFeature) -> Effect:
    configs = strategy.a_sync_configs
    if configs.has_queue or configs.dense == "allreduce":
        return True, f"pushes that may wait to be sent: {configs.send_queue_size}"
    return False, (
        "not set: with dense parameters on servers, a push waits for the reply to the previous; "
        f"up to {configs.send_queue_size} pushes of only rows may wait"
    )


def _max_merge(strategy: ASyncFeature) -> Effect:
    most = strategy.a_sync_configs.max_merge
    if most == 1:
        return False, "each push travels alone"
    return True, f"up to {most} queued pushes travel as one"


def _dense(strategy: ASyncFeature, job: JobFacts) -> Effect:
    configs = strategy.a_sync_configs
    if strategy.a_sync and configs.k_steps:
        return False, "k_steps makes it GeoSGD, which exchanges dense parameters with the servers"
    if configs.dense == "allreduce":
        return True, "the workers all-reduce gradients of dense parameters"
    return True, "the servers store the dense parameters"


def _cache_rows(strategy: ASyncFeature, job: JobFacts) -> Effect:
    configs = strategy.a_sync_configs
    if not (strategy.a_sync and configs.k_steps):
        return False, "only workers of GeoSGD (a_sync with k_steps above 0) train copies of rows"
    return True, f"a worker trains copies of up to {configs.cache_rows:,} rows of a table"


def _table_wire(strategy: ASyncFeature, job: JobFacts) -> Effect:
    form = strategy.a_sync_configs.table_wire
    if form == "fp32":
        return True, "rows and gradients of tables travel as float32"
    return True, f"rows and gradients of tables travel as {form}, unless a layer has its own wire="


def _table_dtype(strategy: ASyncFeature, job: JobFacts) -> Effect:
    dtype = strategy.a_sync_configs.table_dtype
    if dtype == "fp32":
        return True, "servers keep the weights of tables as float32"
    return True, f"servers keep the weights of tables as {dtype}, unless a layer has its own dtype="


def _table_folder(strategy: ASyncFeature, job: JobFacts) -> Effect:
    if not strategy.a_sync_configs.table_folder:
        return (
            True,
            "rows that are not in memory are beside the server's log, or in a temporary file",
        )
    return True, f"rows that are not in memory are in {strategy.a_sync_configs.table_folder}"


def _mode(strategy: ASyncFeature, job: JobFacts) -> Effect:
    configs = strategy.a_sync_configs
    if job.is_collective:
        return False, NO_SERVERS
    if not strategy.a_sync:
        return True, "sync: a step waits for the gradients of all workers"
    if configs.k_steps:
        every = configs.k_steps
        return True, f"GeoSGD: workers train copies and exchange differences every {every} steps"
    if configs.staleness is None:
        return True, "async: a push is applied when it arrives"
    return True, f"async: no worker gets more than {configs.staleness} steps ahead of the slowest"


def _exchange(strategy: ASyncFeature, job: JobFacts) -> Effect:
    return (False, NO_SERVERS) if job.is_collective else (True, "how workers and servers exchange")


@settings_class
class ASyncConfigs(Settings):
    """How workers and parameter servers exchange.

    Example:
        >>> strategy = fleet.DistributedStrategy(a_sync=True)
        >>> strategy.a_sync_configs.staleness = 4
    """

    k_steps: int = setting(
        0, "0: every step; above 0: GeoSGD, every k steps", effect=_k_steps, minimum=0
    )
    staleness: int | None = setting(
        None,
        "how many steps a worker may be ahead of the slowest",
        effect=_in_async(_staleness),
        kind=int,
        minimum=0,
        optional=True,
    )
    send_queue_size: int = setting(
        4,
        "pushes that may wait to be sent; with dense values on servers only if set",
        effect=_in_async(_send_queue_size),
        minimum=1,
    )
    max_merge: int = setting(
        1, "queued pushes that may travel as one", effect=_in_async(_max_merge), minimum=1
    )
    dense: str = setting(
        "servers",
        "who keeps dense parameters in step",
        effect=_dense,
        choices=("servers", "allreduce"),
    )
    on_nonfinite: str = setting(
        "refuse",
        "what a gradient with NaN or infinity does to its push",
        choices=("refuse", "skip", "apply"),
    )
    cache_rows: int = setting(
        4_000_000,
        "rows of a table that a worker of GeoSGD keeps at most",
        effect=_cache_rows,
        minimum=1,
    )

    table_wire: str = setting(
        "fp32",
        "the form in which rows and gradients of tables travel, if their layer names none",
        effect=_table_wire,
        choices=("fp32", "bf16", "fp16", "int8"),
    )

    table_dtype: str = setting(
        "fp32",
        "the type of the weights of tables on servers, if their layer names none",
        effect=_table_dtype,
        choices=("fp32", "bf16"),
    )

    table_folder: str = setting(
        "",
        "a server's folder for rows that are not in memory; empty: beside its log, or temporary",
        effect=_table_folder,
    )

    @property
    def has_queue(self) -> bool:
        """True if the script asks for a queue of pushes, which merging needs too."""
        return self.is_set("send_queue_size") or self.max_merge > 1


@settings_class
class ASyncFeature(Feature):
    """Training with parameter servers."""

    a_sync: bool = setting(False, "parameter servers apply a push when it arrives", effect=_mode)
    a_sync_configs: Nested[ASyncConfigs, ASyncConfigsDict] = nested(
        ASyncConfigs, "GeoSGD, staleness, queues", effect=_exchange
    )
