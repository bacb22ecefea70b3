# SPDX-License-Identifier: Apache-2.0
"""The compression of a model's gradients between hosts, and its error feedback."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from torch import Tensor, nn

from fleetlight.collective.codecs.codec import make_codec
from fleetlight.collective.codecs.compression import Compression
from fleetlight.collective.routes.routing import senders
from fleetlight.errors import PlanError
from fleetlight.fleet.job import Job
from fleetlight.fleet.parts.loss import scaler_at_work
from fleetlight.fleet.protocols import RegisteredModel
from fleetlight.observe.log import logger
from fleetlight.strategy.features.reduction.compression import CODECS


def compression_of(job: Job, module: nn.Module) -> Compression | None:
    """The compression that the strategy asks for; it outlives the replica of the model."""
    strategy = job.strategy
    # with servers the optimizer makes no steps whose momentum DGC could correct
    asked = strategy.compression in CODECS or (strategy.dgc and job.collective_group is not None)
    if job.group.alone or not asked:
        return None
    if module not in job.compressions:
        made = _made(job, module)
        modules = [module, *(managed.module for managed in job.models)]
        made.check(name for one in modules for name, _ in one.named_parameters())
        job.compressions[module] = made
    return job.compressions[module]


def _made(job: Job, module: nn.Module) -> Compression:
    if job.strategy.dgc:
        from fleetlight.fleet.training.dgc import DeepCompression

        return DeepCompression(job, module)
    strategy, configs = job.strategy, job.strategy.compression_configs
    return Compression(
        make_codec(strategy.compression, configs),
        min_size=configs.min_size,
        exclude=configs.exclude,
        error_feedback=configs.error_feedback,
    )


def refuse_scaler(models: Iterable[RegisteredModel]) -> None:
    """PlanError in a step of a GradScaler: error feedback has the loss scale of an earlier step."""
    coded = any(p.replica is not None and p.replica.compression is not None for p in models)
    scaler = scaler_at_work() if coded else None
    if scaler is not None and scaler.is_enabled():
        raise PlanError(
            "compression = 'int8' or 'topk', dgc: a GradScaler steps the optimizer, but values "
            "that were not sent are added to later gradients, which may have another loss scale; "
            "leave it out, and compute in bfloat16, which needs none: "
            "torch.autocast(..., torch.bfloat16), or strategy.amp"
        )


def warn_at_end(job: Job) -> None:
    """Warn on worker 0 when a job ends well."""
    if job.group.index == 0:
        for compression in job.compressions.values():
            compression.warn_at_end()


def feedback_state(job: Job) -> dict[str, Tensor]:
    """The error feedback of this worker, by number of the model and name of the parameter."""
    return {
        f"{number}/{name}": tensor
        for number, compression in _compressions(job)
        for name, tensor in compression.residuals.state().items()
    }


def load_feedback(job: Job, kept: Mapping[str, Tensor], workers: int) -> None:
    """Load the error feedback of a checkpoint of so many workers; each worker has its own."""
    if workers != job.group.size:
        if kept and job.group.index == 0:
            logger.warning(
                "the error feedback of the checkpoint is dropped: it is of %d workers, and this "
                "job has %d",
                workers,
                job.group.size,
            )
        kept = {}
    elif kept and not _sends(job):
        logger.warning(
            "the error feedback of this worker is dropped: in this job another worker sends its "
            "gradients (use_hierarchical_allreduce)"
        )
        kept = {}
    for number, compression in _compressions(job):
        prefix = f"{number}/"
        mine = {n.removeprefix(prefix): t for n, t in kept.items() if n.startswith(prefix)}
        compression.residuals.load(mine)


def _sends(job: Job) -> bool:
    """False where another worker of the host exchanges gradients with other hosts."""
    group, strategy = job.dense_group, job.strategy
    if group is None:
        return True
    by_levels = strategy.use_hierarchical_allreduce
    inner = strategy.hierarchical_allreduce_inter_nranks if by_levels else None
    return group.index in senders(group, inner)


def _compressions(job: Job) -> Iterator[tuple[int, Compression]]:
    for number, managed in enumerate(job.models):
        compression = compression_of(job, managed.module)
        if compression is not None:
            yield number, compression
