# SPDX-License-Identifier: Apache-2.0
"""Tells, setting by setting, whether it takes effect in a job and how.

A rule returns `(active, sentence)`. The rule of a nested config says whether the job looks at it
at all; `field_effects` has the rules of its single fields.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from operator import attrgetter
from typing import TYPE_CHECKING

from fleetlight.errors import StrategyError
from fleetlight.strategy import sparing
from fleetlight.strategy.field_effects import FIELDS
from fleetlight.strategy.job import JobFacts, counted
from fleetlight.strategy.settings import Settings, rules_of

if TYPE_CHECKING:
    from fleetlight.strategy.strategy import DistributedStrategy

Effect = tuple[bool, str]
Rule = Callable[["DistributedStrategy", JobFacts], Effect]


def explain(strategy: DistributedStrategy, job: JobFacts, flags: Mapping[str, str]) -> str:
    """A table of all settings: value, effect in this job, and where the value came from.

    Each field of a nested config has a line, unless nobody has set any and none has an effect.
    """
    rows = [_headline(job)]
    for name, value in strategy.items():
        if not isinstance(value, Settings):
            rows.append(_row(strategy, name, job, flags))
        elif any(value.changed()) or effect_of(strategy, name, job)[0]:
            rows += [_row(strategy, f"{name}.{field}", job, flags) for field in value]
        else:
            rows.append(
                f"   {name} ({', '.join(value.keys())}): {effect_of(strategy, name, job)[1]}"
            )
    rows.append("* takes effect   ! was set but has no effect in this job")
    return "\n".join(rows)


def inert(strategy: DistributedStrategy, job: JobFacts) -> list[str]:
    """One sentence for each setting that was made and has no effect in this job."""
    sentences = []
    for name in _changed(strategy):
        active, why = effect_of(strategy, name, job)
        if not active:
            value = attrgetter(name)(strategy)
            sentences.append(f"strategy.{name} = {value!r} has no effect: {why}")
    return sentences


def effect_of(strategy: DistributedStrategy, name: str, job: JobFacts) -> Effect:
    """Whether one setting takes effect in this job, and a sentence about it.

    `a_sync_configs.staleness` is a field of a nested config.
    """
    config, _, field = name.partition(".")
    if not rules_of(strategy, config).available:
        return False, "not yet available in this version"
    active, why = _RULES[config](strategy, job)
    if not active or not field:
        return active, why
    if name in FIELDS:
        return FIELDS[name](strategy, job)
    return True, rules_of(getattr(strategy, config), field).doc


def _changed(strategy: DistributedStrategy) -> Iterator[str]:
    """The settings whose value is not the default; of nested configs the fields."""
    for name, value in strategy.changed():
        if isinstance(value, Settings):
            yield from (f"{name}.{field}" for field, _ in value.changed())
        else:
            yield name


def _row(strategy: DistributedStrategy, name: str, job: JobFacts, flags: Mapping[str, str]) -> str:
    active, why = effect_of(strategy, name, job)
    mark = "*" if active else ("!" if name in _changed(strategy) else " ")
    config, _, field = name.rpartition(".")
    owner: Settings = getattr(strategy, config) if config else strategy
    source = f" (from {flags[name]})" if name in flags and not owner.said(field) else ""
    return f" {mark} {name} = {attrgetter(name)(strategy)!r}{source}: {why}"


def _headline(job: JobFacts) -> str:
    servers = counted(job.server_num, "server")
    mode = "collective" if job.is_collective else f"parameter-server, {servers}"
    workers, hosts = counted(job.worker_num, "worker"), counted(job.node_num, "host")
    return f"job: {mode}, {workers} on {hosts}, {job.backend}"


def _on_reduction(sentence: Callable[[DistributedStrategy, JobFacts], str]) -> Rule:
    """A rule for settings of the gradient all-reduce."""
    return _when_reducing(lambda strategy, job: (True, sentence(strategy, job)))


def _when_reducing(rule: Rule) -> Rule:
    """A rule that needs workers that all-reduce their gradients."""

    def both(strategy: DistributedStrategy, job: JobFacts) -> Effect:
        if not _all_reduces(strategy, job):
            return False, "gradients go to the parameter servers, not through an all-reduce"
        if job.worker_num == 1:
            return False, "one worker has nobody to reduce with"
        return rule(strategy, job)

    return both


def _all_reduces(strategy: DistributedStrategy, job: JobFacts) -> bool:
    """True where workers all-reduce gradients: of everything, or of what no server keeps."""
    return job.is_collective or strategy.a_sync_configs.dense == "allreduce"


def _follows(switch: str, sentence: str) -> Rule:
    """A rule for the configuration of a switch."""

    def rule(strategy: DistributedStrategy, job: JobFacts) -> Effect:
        active, why = effect_of(strategy, switch, job)
        if not active:
            return False, f"{switch} has no effect: {why}"
        if not getattr(strategy, switch):
            return False, f"{switch} is off"
        return True, sentence

    return rule


def _always(sentence: str) -> Rule:
    return lambda strategy, job: (True, sentence)


def _fused(rule: Rule) -> Rule:
    """A rule that also needs fusion to be on."""

    def both(strategy: DistributedStrategy, job: JobFacts) -> Effect:
        active, why = rule(strategy, job)
        if active and not strategy.fuse_all_reduce_ops:
            return False, "fuse_all_reduce_ops is off: every gradient travels alone"
        return active, why

    return both


def _merge(strategy: DistributedStrategy, job: JobFacts) -> Effect:
    if not strategy.gradient_merge:
        return True, "off: every backward makes a step"
    k = strategy.gradient_merge_configs.k_steps
    if k == 1:
        return False, "gradient_merge_configs.k_steps is 1: nothing to merge"
    return True, f"{k} backwards make one optimizer step, reduced once"


def _recompute(strategy: DistributedStrategy, job: JobFacts) -> Effect:
    if strategy.recompute and not strategy.recompute_configs.checkpoints:
        return False, "recompute_configs.checkpoints names no module"
    return True, "the named modules keep no activations" if strategy.recompute else "off"


def _scale(strategy: DistributedStrategy, job: JobFacts) -> Effect:
    if not job.is_collective:
        return False, (
            "only a collective job can sum; with parameter servers, gradients of one step that "
            "come together are averaged"
        )
    return _on_reduction(lambda s, j: f"the {s.gradient_scale} over the workers")(strategy, job)


def _inner_group(strategy: DistributedStrategy, job: JobFacts) -> Effect:
    inner = strategy.hierarchical_allreduce_inter_nranks
    active, why = _follows("use_hierarchical_allreduce", "all workers of a host sum at once")(
        strategy, job
    )
    if not active or inner == 0:
        return active, why
    if inner == 1:
        return False, "a group of one has nothing to sum, so all workers of a host sum at once"
    return True, f"up to {inner} workers, all of one host, sum first"


def _deadline(strategy: DistributedStrategy, job: JobFacts) -> Effect:
    what = "bounds every wait for a peer"
    if job.deadline_s is None:
        return True, f"given to fleet.init, it {what}"
    if strategy.said("deadline_s") and strategy.deadline_s != job.deadline_s:
        return False, (
            f"it takes effect only when given to fleet.init; in force are {job.deadline_s:g} s, "
            f"from {job.deadline_from}"
        )
    return True, f"{job.deadline_s:g} s are in force, from {job.deadline_from}; it {what}"


def check(strategy: DistributedStrategy, job: JobFacts) -> None:
    """Raise where going on would silently send in the clear what was to be encrypted."""
    reduces = _all_reduces(strategy, job) and job.backend == "nccl"
    if strategy.ssl and reduces and job.worker_num > 1 and job.node_num > 1:
        raise StrategyError(
            f"strategy.ssl = {strategy.ssl!r}: the workers of this job all-reduce by NCCL across "
            f"{job.node_num} hosts, and NCCL cannot encrypt; leave ssl out and put the hosts into "
            "an encrypted network (WireGuard, IPsec), or train on CPUs"
        )
    if strategy.ssl and job.deadline_s is not None and job.ssl is None and job.node_num > 1:
        raise StrategyError(
            f"strategy.ssl = {strategy.ssl!r} came after fleet.init, and the connections of this "
            f"job on {job.node_num} hosts are open and not encrypted; give the strategy to "
            "fleet.init(strategy=...), or start the job with fleetrun --ssl"
        )


def _ssl(strategy: DistributedStrategy, job: JobFacts) -> Effect:
    if not strategy.ssl:
        return True, "connections are not encrypted"
    if job.is_collective and job.node_num == 1:
        return False, "what a collective job sends stays on this host, and is not encrypted"
    if job.deadline_s is not None and job.ssl != strategy.ssl:
        force = f"in force is {job.ssl!r}" if job.ssl else "connections are not encrypted"
        return False, f"it takes effect only when given to fleet.init; {force}"
    if job.is_collective:
        return True, "TLS 1.3 between workers of different hosts; both sides show a certificate"
    return True, "TLS 1.3 between workers and servers; both sides show a certificate"


def _ssl_configs(strategy: DistributedStrategy, job: JobFacts) -> Effect:
    if not strategy.ssl:
        return False, "ssl is off"
    if job.deadline_s is not None and job.ssl is None:
        return False, "it takes effect only when given to fleet.init"
    # certificates are looked at also where nothing leaves the host
    return True, "of the certificates in ssl"


_KEPT = {
    "none": "a server that dies takes its values with it",
    "snapshot": "a server that dies goes on from its last snapshot; what came later is lost",
    "log": "a server that dies goes on with all that it has acknowledged",
}


def _durability(strategy: DistributedStrategy, job: JobFacts) -> Effect:
    if job.is_collective:
        return False, _NO_SERVERS
    return True, _KEPT[strategy.durability]


def _lost_worker(strategy: DistributedStrategy, job: JobFacts) -> Effect:
    if job.is_collective:
        return False, _NO_SERVERS
    if job.worker_num == 1:
        return False, "there is one worker, and no job without it"
    if strategy.lost_worker == "fail":
        return True, "the job fails with it, or starts again"
    return True, "the others go on; the job fails with worker 0 only"


def _buffers(strategy: DistributedStrategy, job: JobFacts) -> Effect:
    if job.worker_num == 1:
        return False, "one worker has nobody to take buffers from"
    if not strategy.broadcast_buffers:
        return True, "each worker keeps its own buffers, such as batch norm's statistics"
    when = "before each forward that trains" if job.is_collective else "at the start"
    return True, f"the workers take worker 0's buffers {when}"


def _worker_seeds(strategy: DistributedStrategy, job: JobFacts) -> Effect:
    if job.worker_num == 1:
        return False, "one worker draws what its script has seeded"
    if strategy.worker_seeds == "same":
        return True, "the workers draw what their scripts have seeded: dropout masks may be equal"
    return True, "once training begins, each worker draws its own: dropout masks differ"


_NO_SERVERS = "a collective job has no parameter servers"


def _checkpoint(strategy: DistributedStrategy, job: JobFacts) -> Effect:
    if not strategy.checkpoint:
        return True, "the job saves when the script does"
    if job.deadline_s is not None and job.checkpoint != strategy.checkpoint:
        force = f"in force is {job.checkpoint!r}" if job.checkpoint else "the job does not save"
        return False, f"it takes effect only when given to fleet.init; {force}"
    return True, f"the job saves by itself, and when it is stopped, into {strategy.checkpoint}"


def _a_sync(strategy: DistributedStrategy, job: JobFacts) -> Effect:
    configs = strategy.a_sync_configs
    if job.is_collective:
        return False, _NO_SERVERS
    if not strategy.a_sync:
        return True, "sync: a step waits for the gradients of all workers"
    if configs.k_steps:
        return (
            True,
            f"GeoSGD: workers train by themselves and exchange every {configs.k_steps} steps",
        )
    if configs.staleness is None:
        return True, "async: a push is applied when it arrives"
    return True, f"async: no worker gets more than {configs.staleness} steps ahead of the slowest"


def _execution(strategy: DistributedStrategy, job: JobFacts) -> Effect:
    if job.has_programs:
        return True, "how programs run"
    return False, (
        "it is for static programs; for an eager loop OMP_NUM_THREADS or torch.set_num_threads "
        "set the threads of an operator, and memory is freed at once by reference counts"
    )


def _a_sync_configs(strategy: DistributedStrategy, job: JobFacts) -> Effect:
    if job.is_collective:
        return False, _NO_SERVERS
    return True, "how workers and servers exchange"


_RULES: dict[str, Rule] = {
    "a_sync": _a_sync,
    "a_sync_configs": _a_sync_configs,
    "durability": _durability,
    "durability_configs": _follows("durability", "as durability says"),
    "checkpoint": _checkpoint,
    "checkpoint_configs": _follows("checkpoint", "as checkpoint says"),
    "lost_worker": _lost_worker,
    "localsgd": sparing.localsgd,
    "localsgd_configs": _follows("localsgd", "as localsgd says"),
    "adaptive_localsgd": sparing.adaptive_localsgd,
    "adaptive_localsgd_configs": _follows("adaptive_localsgd", "as adaptive_localsgd says"),
    "diloco": sparing.diloco,
    "diloco_configs": _follows("diloco", "as diloco says"),
    "compression": _when_reducing(sparing.compression),
    "compression_configs": _when_reducing(sparing.compression_configs),
    "dgc": _when_reducing(sparing.dgc),
    "dgc_configs": _follows("dgc", "as dgc says"),
    "fuse_all_reduce_ops": _on_reduction(
        lambda s, j: (
            "gradients travel in buckets"
            if s.fuse_all_reduce_ops
            else "every gradient travels alone"
        )
    ),
    "fuse_grad_size_in_MB": _fused(
        _on_reduction(lambda s, j: f"a bucket holds up to {s.fuse_grad_size_in_MB:g} MiB")
    ),
    "fuse_grad_size_in_num": _fused(
        _on_reduction(
            lambda s, j: (
                f"a bucket holds up to {s.fuse_grad_size_in_num} gradients"
                if s.fuse_grad_size_in_num
                else "no limit on the gradients of a bucket"
            )
        )
    ),
    "use_hierarchical_allreduce": _when_reducing(sparing.hierarchy),
    "hierarchical_allreduce_inter_nranks": _when_reducing(_inner_group),
    "nccl_comm_num": _when_reducing(sparing.process_groups),
    "shared_memory": _on_reduction(
        lambda s, j: (
            "workers of one host sum in shared memory where they can"
            if s.shared_memory
            else "all sums go through process groups"
        )
    ),
    "sync_nccl_allreduce": _on_reduction(
        lambda s, j: (
            "a bucket is finished before the next one starts"
            if s.sync_nccl_allreduce
            else "buckets overlap with backward"
        )
    ),
    "gradient_merge": _merge,
    "gradient_merge_configs": _follows("gradient_merge", "as gradient_merge says"),
    "fp16_allreduce": _when_reducing(sparing.narrowing),
    "amp": lambda s, j: (True, f"autocast to {s.amp_configs.dtype}" if s.amp else "off"),
    "amp_configs": _follows("amp", "used by autocast and by optimizer.minimize"),
    "recompute": _recompute,
    "recompute_configs": _follows("recompute", "the modules named recompute"),
    "sync_batch_norm": _on_reduction(
        lambda s, j: (
            "statistics over the batches of all workers"
            if s.sync_batch_norm
            else "every worker normalises by its own batch"
        )
    ),
    "broadcast_buffers": _buffers,
    "find_unused_parameters": _on_reduction(
        lambda s, j: (
            "each backward looks for unused parameters"
            if s.find_unused_parameters
            else "every parameter must take part in every backward"
        )
    ),
    "gradient_scale": _scale,
    "fetch_frequency": lambda s, j: (
        (True, f"a program computes what is fetched on every {s.fetch_frequency}. run")
        if j.has_programs
        else (
            False,
            "it is for static programs; an eager loop decides itself when it calls loss.item()",
        )
    ),
    "execution_strategy": _execution,
    "ssl": _ssl,
    "ssl_configs": _ssl_configs,
    "seed": _always(
        "order of records and first values of rows; torch's own generators are not touched"
    ),
    "worker_seeds": _worker_seeds,
    "deadline_s": _deadline,
}
