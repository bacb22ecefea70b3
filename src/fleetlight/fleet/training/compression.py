# SPDX-License-Identifier: Apache-2.0
"""In which form the gradients of a model cross between hosts, and what this worker owes of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from torch import Tensor, nn

from fleetlight.collective.codecs.compression import Compression
from fleetlight.collective.codecs.int8 import Int8
from fleetlight.collective.codecs.topk import TopK
from fleetlight.collective.routes.routing import senders
from fleetlight.errors import PlanError
from fleetlight.fleet.context import Context
from fleetlight.fleet.loss_scaling import scaler_at_work
from fleetlight.observe.log import logger

if TYPE_CHECKING:
    from fleetlight.fleet.training.model import ModelPlan


def compression_of(context: Context, module: nn.Module) -> Compression | None:
    """What the strategy asks for. There is one of each model, however often workers agree anew."""
    strategy = context.strategy
    # where there are servers, steps are not the optimizer's own: DGC has nothing to correct
    asked = strategy.compression in ("int8", "topk") or (strategy.dgc and not context.is_served)
    if context.group.alone or not asked:
        return None
    if module not in context.compressions:
        made = _made(context, module)
        modules = [module, *(plan.module for plan in context.models)]
        made.check(name for one in modules for name, _ in one.named_parameters())
        context.compressions[module] = made
    return context.compressions[module]


def _made(context: Context, module: nn.Module) -> Compression:
    if context.strategy.dgc:
        from fleetlight.fleet.training.dgc import DeepCompression

        return DeepCompression(context, module)
    strategy, configs = context.strategy, context.strategy.compression_configs
    return Compression(
        Int8() if strategy.compression == "int8" else TopK(configs.ratio),
        min_size=configs.min_size,
        exclude=configs.exclude,
        error_feedback=configs.error_feedback,
    )


def refuse_scaler(models: Iterable[ModelPlan]) -> None:
    """Called within a step: what is owed was made with another loss scale."""
    coded = any(p.replica is not None and p.replica.compression is not None for p in models)
    scaler = scaler_at_work() if coded else None
    if scaler is not None and scaler.is_enabled():
        raise PlanError(
            "compression = 'int8' or 'topk', dgc: a GradScaler steps the optimizer, and what was "
            "not sent is added to later gradients, whose loss scale is another; leave it out, and "
            "compute in bfloat16, which needs none: torch.autocast(..., torch.bfloat16), or "
            "strategy.amp"
        )


def tell_at_end(context: Context) -> None:
    """What is to be said of it when a job ends well."""
    if context.group.index == 0:
        for compression in context.compressions.values():
            compression.tell_at_end()


def unsent(context: Context) -> dict[str, Tensor]:
    """What this worker keeps of gradients that were not sent as they are."""
    return {
        f"{number}/{name}": tensor
        for number, compression in _compressions(context)
        for name, tensor in compression.ledger.state().items()
    }


def load_unsent(context: Context, kept: Mapping[str, Tensor], workers: int) -> None:
    """The way back, of a checkpoint of so many workers. It is each worker's own."""
    if workers != context.group.size:
        if kept and context.group.index == 0:
            logger.warning(
                "what %d workers had still to send, of gradients or movements, is dropped: this "
                "job has %d",
                workers,
                context.group.size,
            )
        kept = {}
    elif kept and not _sends(context):
        logger.warning(
            "what this worker had still to send, of gradients or movements, is dropped: in this "
            "job another one sends for it, see use_hierarchical_allreduce"
        )
        kept = {}
    for number, compression in _compressions(context):
        prefix = f"{number}/"
        mine = {n.removeprefix(prefix): t for n, t in kept.items() if n.startswith(prefix)}
        compression.ledger.load(mine)


def _sends(context: Context) -> bool:
    """False where this worker leaves it to another one to meet those of other hosts."""
    group, strategy = context.dense_group, context.strategy
    if group is None:
        return True
    by_levels = strategy.use_hierarchical_allreduce
    inner = strategy.hierarchical_allreduce_inter_nranks if by_levels else None
    return group.index in senders(group, inner)


def _compressions(context: Context) -> Iterator[tuple[int, Compression]]:
    for number, plan in enumerate(context.models):
        compression = compression_of(context, plan.module)
        if compression is not None:
            yield number, compression
