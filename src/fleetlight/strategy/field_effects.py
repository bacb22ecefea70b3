# SPDX-License-Identifier: Apache-2.0
"""Effects of single fields of the nested configs, in jobs that look at the config.

A field without a rule takes effect whenever its config does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from fleetlight.strategy.job import JobFacts, counted

if TYPE_CHECKING:
    from fleetlight.strategy.effects import Effect, Rule
    from fleetlight.strategy.strategy import DistributedStrategy


def _in_async(rule: Callable[[DistributedStrategy], Effect]) -> Rule:
    """A rule of the asynchronous modes other than GeoSGD."""

    def both(strategy: DistributedStrategy, job: JobFacts) -> Effect:
        if not strategy.a_sync:
            return False, "a_sync is off, and in sync mode each step is one push"
        if strategy.a_sync_configs.k_steps:
            return False, "k_steps makes it GeoSGD, whose workers exchange every k steps only"
        return rule(strategy)

    return both


def _k_steps(strategy: DistributedStrategy, job: JobFacts) -> Effect:
    k = strategy.a_sync_configs.k_steps
    if not strategy.a_sync:
        return False, "a_sync is off: workers and servers exchange at every step"
    if k == 0:
        return True, "workers and servers exchange at every step"
    return True, f"GeoSGD: workers and servers exchange every {counted(k, 'step')}"


def _staleness(strategy: DistributedStrategy) -> Effect:
    bound = strategy.a_sync_configs.staleness
    if bound is None:
        return True, "no bound on how far a worker may be ahead of the slowest"
    return True, f"no worker gets more than {counted(bound, 'step')} ahead of the slowest"


def _send_queue_size(strategy: DistributedStrategy) -> Effect:
    configs = strategy.a_sync_configs
    if configs.has_queue or configs.dense == "allreduce":
        return True, f"pushes that may wait to be sent: {configs.send_queue_size}"
    return False, (
        "not set: with dense parameters on servers a push waits for the answer to the one before; "
        f"of rows alone {configs.send_queue_size} pushes may wait"
    )


def _max_merge(strategy: DistributedStrategy) -> Effect:
    most = strategy.a_sync_configs.max_merge
    if most == 1:
        return False, "each push travels alone"
    return True, f"up to {most} queued pushes travel as one"


def _dense(strategy: DistributedStrategy, job: JobFacts) -> Effect:
    configs = strategy.a_sync_configs
    if strategy.a_sync and configs.k_steps:
        return False, "k_steps makes it GeoSGD, which exchanges dense parameters with the servers"
    if configs.dense == "allreduce":
        return True, "the workers all-reduce gradients of dense parameters"
    return True, "the servers keep dense parameters"


def _cache_rows(strategy: DistributedStrategy, job: JobFacts) -> Effect:
    configs = strategy.a_sync_configs
    if not (strategy.a_sync and configs.k_steps):
        return False, "only workers of GeoSGD (a_sync with k_steps above 0) keep rows"
    return True, f"a worker keeps up to {configs.cache_rows:,} rows of a table"


def _loss_scale(sentence: str) -> Rule:
    """A rule of float16, whose small gradients vanish without a scale."""

    def rule(strategy: DistributedStrategy, job: JobFacts) -> Effect:
        if strategy.amp_configs.dtype == "bfloat16":
            return False, "bfloat16 needs no loss scale"
        return True, sentence

    return rule


def _ratio(strategy: DistributedStrategy, job: JobFacts) -> Effect:
    if strategy.compression == "int8":
        return False, "it is for compression = 'topk'; int8 sends all values"
    return True, f"topk sends {100 * strategy.compression_configs.ratio:.4g} % of the values"


def _rampup_step(strategy: DistributedStrategy, job: JobFacts) -> Effect:
    steps, levels = strategy.dgc_configs.rampup_step, strategy.dgc_configs.sparsity
    if len(levels) == 1:
        return False, "sparsity has one value, so there is nothing to walk through"
    return True, f"the {len(levels)} sparsities are walked through in {counted(steps, 'step')}"


def _via(strategy: DistributedStrategy, job: JobFacts) -> Effect:
    if job.is_collective:
        return False, "a collective job has no tables"
    if strategy.checkpoint_configs.via == "worker0":
        return True, "servers send the files of their tables to worker 0"
    return True, "each server writes the files of its tables into the folder"


def _drop_scope(strategy: DistributedStrategy, job: JobFacts) -> Effect:
    return False, "memory is freed at once by reference counts, so there is no scope to drop"


def _threads(strategy: DistributedStrategy, job: JobFacts) -> Effect:
    threads = counted(strategy.execution_strategy.num_threads, "thread")
    return True, f"operators of a program run on {threads}"


def _ciphers(strategy: DistributedStrategy, job: JobFacts) -> Effect:
    if job.is_collective and job.node_num == 1:
        return False, "what a collective job sends stays on this host, and is not encrypted"
    if not strategy.ssl_configs.ciphers:
        return True, "the suites of TLS 1.3 that OpenSSL chooses"
    return True, f"one of {strategy.ssl_configs.ciphers}"


FIELDS: Mapping[str, Rule] = {
    "a_sync_configs.k_steps": _k_steps,
    "a_sync_configs.staleness": _in_async(_staleness),
    "a_sync_configs.send_queue_size": _in_async(_send_queue_size),
    "a_sync_configs.max_merge": _in_async(_max_merge),
    "a_sync_configs.dense": _dense,
    "a_sync_configs.cache_rows": _cache_rows,
    "amp_configs.init_loss_scaling": _loss_scale("first loss scale of float16"),
    "amp_configs.use_dynamic_loss_scaling": _loss_scale("adapt the loss scale of float16"),
    "checkpoint_configs.via": _via,
    "compression_configs.ratio": _ratio,
    "dgc_configs.rampup_step": _rampup_step,
    "execution_strategy.num_iteration_per_drop_scope": _drop_scope,
    "execution_strategy.num_threads": _threads,
    "ssl_configs.ciphers": _ciphers,
}
