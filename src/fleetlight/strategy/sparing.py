# SPDX-License-Identifier: Apache-2.0
"""Effects of the settings that spare the network between hosts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fleetlight.strategy.job import JobFacts, counted

if TYPE_CHECKING:
    from fleetlight.strategy.effects import Effect
    from fleetlight.strategy.strategy import DistributedStrategy


def hierarchy(strategy: DistributedStrategy, job: JobFacts) -> Effect:
    """Of sums inside the hosts first."""
    inner = strategy.hierarchical_allreduce_inter_nranks
    if not strategy.use_hierarchical_allreduce:
        return True, "off: all workers take part in one all-reduce"
    if not job.is_collective:
        return True, "where workers share hosts, those of one sum first"
    if job.backend != "gloo" and not _is_coded(strategy, job):
        return False, "it is for CPUs: on GPUs NCCL finds its own way through the hosts"
    if job.node_num == 1 and not 1 < inner < job.worker_num:
        return False, "all workers are on one host, so there is no link between hosts to spare"
    if job.node_num == job.worker_num:
        return False, "every host has one worker, so there is nothing to sum inside"
    return True, "workers of one host sum first, and one of each host meets the others"


def process_groups(strategy: DistributedStrategy, job: JobFacts) -> Effect:
    """Of how many process groups there are."""
    count = strategy.nccl_comm_num
    if not job.is_collective:
        # which kind they are, and whether they are needed, turns out when the workers meet
        return True, f"{counted(count, 'process group')}, used where shared memory is not"
    levels = strategy.use_hierarchical_allreduce and hierarchy(strategy, job)[0]
    if strategy.shared_memory and job.backend == "gloo" and job.node_num == 1 and not levels:
        return False, (
            "the workers of one host sum in shared memory, not through process groups; "
            "shared_memory=False lets buckets take turns over them"
        )
    if levels:
        return True, f"the leaders of the hosts have {counted(count, 'process group')}"
    if count == 1:
        return True, f"all buckets go through one {job.backend} process group"
    return True, f"buckets take turns over {count} {job.backend} process groups"


def compression(strategy: DistributedStrategy, job: JobFacts) -> Effect:
    """In which form gradients cross between hosts."""
    if strategy.compression == "none":
        return True, _elsewhere(strategy, "fp16_allreduce", "dgc")
    if not _travels_so(strategy, job, coded=strategy.compression in ("int8", "topk")):
        return False, _NO_LINK
    if strategy.compression == "fp16" and _moves(strategy, job):
        return True, _MOVED
    ratio = _percent(strategy.compression_configs.ratio)
    return True, _FORMS[strategy.compression].format(_senders(job), ratio)


_NO_LINK = "all workers are on one host, so nothing crosses a link that could be spared"

_MOVED = (
    "as bfloat16: to float16, what workers that train alone have moved by would often be nothing"
)

_FORMS = {
    "fp16": "gradients cross between {} as float16",
    "bf16": "gradients cross between {} as bfloat16",
    "int8": "gradients cross between {} as int8, with a scale for every block",
    "topk": "of the gradients, the {1} that are largest cross between {0}",
}


def _senders(job: JobFacts) -> str:
    """Between whom something crosses that is not in its own form."""
    return "workers" if job.is_collective and job.node_num == 1 else "hosts"


def _elsewhere(strategy: DistributedStrategy, *others: str) -> str:
    """Of a setting that leaves the form of gradients to those others that are on."""
    said = [name for name in others if getattr(strategy, name) not in (False, "none")]
    return f"as {said[0]} says" if said else "gradients travel in their own type"


def compression_configs(strategy: DistributedStrategy, job: JobFacts) -> Effect:
    """What int8 and topk send."""
    if strategy.compression not in ("int8", "topk"):
        return False, "they are for compression = 'int8' or 'topk'"
    active, why = compression(strategy, job)
    if not active:
        return False, f"compression has no effect: {why}"
    return True, "as compression says"


def narrowing(strategy: DistributedStrategy, job: JobFacts) -> Effect:
    """Of `fp16_allreduce`."""
    if strategy.fp16_allreduce is False:
        return True, _elsewhere(strategy, "compression", "dgc")
    if not _travels_so(strategy, job, coded=False):
        return False, _NO_LINK
    if strategy.fp16_allreduce == "bf16":
        return True, "as bfloat16"
    return True, _MOVED if _moves(strategy, job) else "as float16"


def dgc(strategy: DistributedStrategy, job: JobFacts) -> Effect:
    """Of deep gradient compression."""
    if not strategy.dgc:
        return True, "off: gradients are dense"
    if not job.is_collective:
        return False, (
            "it is for collective jobs, whose steps are the optimizer's own; with parameter "
            "servers, compression = 'topk' goes with dense gradients that are reduced"
        )
    if not _travels_so(strategy, job, coded=True):
        return False, _NO_LINK
    last = strategy.dgc_configs.sparsity[-1]
    return True, f"the largest {_percent(1 - last)} of the gradients are sent"


def _travels_so(strategy: DistributedStrategy, job: JobFacts, *, coded: bool) -> bool:
    """False where workers are on one host, and what travels in another form spares no link.

    NCCL has no shared memory to sum in, so narrow types may be of use there.
    """
    if not job.is_collective or job.node_num > 1 or not strategy.shared_memory:
        return True
    return job.backend != "gloo" and not coded


def _is_coded(strategy: DistributedStrategy, job: JobFacts) -> bool:
    """Whether gradients travel as messages of a codec, which go by levels on GPUs as well."""
    asked = strategy.dgc or strategy.compression in ("int8", "topk")
    return asked and _travels_so(strategy, job, coded=True)


def _moves(strategy: DistributedStrategy, job: JobFacts) -> bool:
    """Whether workers train alone, and tell each other how far they have moved."""
    return any(
        getattr(strategy, effect.__name__) and effect(strategy, job)[0]
        for effect in (localsgd, adaptive_localsgd, diloco)
    )


def localsgd(strategy: DistributedStrategy, job: JobFacts) -> Effect:
    """Of LocalSGD."""
    configs = strategy.localsgd_configs
    sentence = f"parameters are averaged every {counted(configs.k_steps, 'step')}"
    return _alone(strategy.localsgd, configs.k_steps, configs.begin_step, sentence, job)


def adaptive_localsgd(strategy: DistributedStrategy, job: JobFacts) -> Effect:
    """Of LocalSGD whose k follows the loss."""
    configs = strategy.adaptive_localsgd_configs
    sentence = (
        f"parameters are averaged every {counted(configs.init_k_steps, 'step')} at first, then as "
        f"the loss falls, at most every {configs.max_k_steps}"
    )
    return _alone(
        strategy.adaptive_localsgd, configs.max_k_steps, configs.begin_step, sentence, job
    )


def diloco(strategy: DistributedStrategy, job: JobFacts) -> Effect:
    """Of DiLoCo; an outer step is worth making after every inner step, too."""
    configs = strategy.diloco_configs
    sentence = f"an outer step every {counted(configs.k_steps, 'step')}"
    return _alone(strategy.diloco, max(2, configs.k_steps), configs.begin_step, sentence, job)


def _alone(on: bool, k: int, begin_step: int, sentence: str, job: JobFacts) -> Effect:
    """Of a setting by which workers train alone for up to k steps."""
    if not on:
        return True, "off: the workers meet at every step"
    if not job.is_collective:
        return False, (
            "it is for collective jobs; with parameter servers, a_sync_configs.k_steps (GeoSGD) "
            "lets workers train by themselves"
        )
    if job.worker_num == 1:
        return False, "one worker has nobody to meet"
    if k == 1:
        return False, "to average after every step is to train synchronously, which is what is done"
    return True, sentence + (f", from step {begin_step + 1} on" if begin_step > 1 else "")


def _percent(ratio: float) -> str:
    return f"{100 * ratio:.4g} %"
