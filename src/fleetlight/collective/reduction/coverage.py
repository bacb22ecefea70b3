# SPDX-License-Identifier: Apache-2.0
"""Which gradients of a model may travel coded."""

from __future__ import annotations

import torch
from torch import nn

from fleetlight.collective.codecs.compression import Compression
from fleetlight.observe.log import logger


def coded_in(module: nn.Module, compression: Compression | None) -> dict[str, nn.Parameter]:
    """The covered parameters whose gradients a codec can encode: dense ones of float32."""
    if compression is None:
        return {}
    sparse = sparse_names(module)
    return {
        name: parameter
        for name, parameter in module.named_parameters()
        if name not in sparse
        and parameter.dtype == torch.float32
        and compression.covers(name, parameter)
    }


def warn_of_uncoded(module: nn.Module, compression: Compression) -> None:
    """Warn where covered gradients travel as they are, or all do."""
    trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
    coded, codec = coded_in(module, compression), compression.codec.name
    others = [n for n, p in trained.items() if n not in coded and compression.covers(n, p)]
    if others:
        name = others[0]
        kind = str(trained[name].dtype).removeprefix("torch.")
        logger.warning(
            "%s takes dense gradients of float32; of those that are large enough %d will travel as "
            "they are, such as that of %s, which is %s",
            codec,
            len(others),
            name,
            "sparse" if name in sparse_names(module) else kind,
        )
    elif trained and not coded:
        logger.warning(
            "%s has no effect: all parameters of the model have one dimension, fewer values than "
            "min_size, or are excluded",
            codec,
        )


def sparse_names(module: nn.Module) -> set[str]:
    """The parameters with sparse gradients: weights of embeddings with `sparse=True`."""
    return {
        f"{name}.weight" if name else "weight"
        for name, child in module.named_modules()
        if isinstance(child, (nn.Embedding, nn.EmbeddingBag)) and child.sparse
    }
