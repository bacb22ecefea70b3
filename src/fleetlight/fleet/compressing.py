# SPDX-License-Identifier: Apache-2.0
"""In which form the gradients of a model cross between hosts, and what this worker owes of them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from torch import Tensor, nn

from fleetlight.collective.codecs.compression import Compression
from fleetlight.collective.codecs.int8 import Int8
from fleetlight.collective.codecs.topk import TopK
from fleetlight.fleet.context import Context
from fleetlight.observe.log import logger

if TYPE_CHECKING:
    from fleetlight.checkpoint import Checkpoint

#: before the names of what is kept, in a worker's part of a checkpoint
_KEPT = "compression/"


def compression_of(context: Context, module: nn.Module) -> Compression | None:
    """What the strategy asks for. There is one of each model, however often workers agree anew."""
    strategy = context.strategy
    if context.group.alone or not (strategy.dgc or strategy.compression in ("int8", "topk")):
        return None
    if module not in context.compressions:
        made = _made(context, module)
        modules = [module, *(plan.module for plan in context.models)]
        made.check(name for one in modules for name, _ in one.named_parameters())
        context.compressions[module] = made
    return context.compressions[module]


def _made(context: Context, module: nn.Module) -> Compression:
    if context.strategy.dgc:
        from fleetlight.fleet.dgc import DeepCompression

        return DeepCompression(context, module)
    strategy, configs = context.strategy, context.strategy.compression_configs
    return Compression(
        Int8() if strategy.compression == "int8" else TopK(configs.ratio),
        min_size=configs.min_size,
        exclude=configs.exclude,
        error_feedback=configs.error_feedback,
    )


def saved_tensors(context: Context) -> dict[str, Tensor]:
    """What this worker keeps of gradients that were not sent as they are."""
    return {
        _prefix(number) + name: tensor
        for number, compression in _compressions(context)
        for name, tensor in compression.ledger.state().items()
    }


def fitted(context: Context, saved: Checkpoint) -> Iterator[Callable[[], None]]:
    """The steps that give it back. It is each worker's own, so their number must be the same."""
    state = saved.worker(context.group.index)
    tensors = {} if state is None else state.tensors
    kept = {name: tensor for name, tensor in tensors.items() if name.startswith(_KEPT)}
    if saved.manifest.workers != context.group.size:
        if kept and context.group.index == 0:
            logger.warning(
                "what %d workers had not sent of their gradients is dropped: this job has %d",
                saved.manifest.workers,
                context.group.size,
            )
        kept = {}
    for number, compression in _compressions(context):
        prefix = _prefix(number)
        mine = {n.removeprefix(prefix): t for n, t in kept.items() if n.startswith(prefix)}
        yield functools.partial(compression.ledger.load, mine)


def _compressions(context: Context) -> Iterator[tuple[int, Compression]]:
    for number, plan in enumerate(context.models):
        compression = compression_of(context, plan.module)
        if compression is not None:
            yield number, compression


def _prefix(number: int) -> str:
    return f"{_KEPT}{number}/"
