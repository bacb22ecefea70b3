# SPDX-License-Identifier: Apache-2.0
"""Which gradients of a model may travel in the form of a codec."""

from __future__ import annotations

import torch
from torch import nn

from fleetlight.collective.codecs.compression import Compression


def coded_in(module: nn.Module, compression: Compression | None) -> dict[str, nn.Parameter]:
    """The parameters that it covers and whose gradients codecs can take: dense ones of float32."""
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


def sparse_names(module: nn.Module) -> set[str]:
    """Parameters whose gradients are sparse: the weights of embeddings that say so."""
    return {
        f"{name}.weight" if name else "weight"
        for name, child in module.named_modules()
        if isinstance(child, (nn.Embedding, nn.EmbeddingBag)) and child.sparse
    }
