# SPDX-License-Identifier: Apache-2.0
"""Narrower floating-point types, which can be summed as they are."""

from __future__ import annotations

import torch
from torch import Tensor


def narrow_type(asked: bool | str) -> torch.dtype | None:
    """The type that a strategy's `fp16_allreduce` or `compression` asks for; None: as it is."""
    if asked == "bf16":
        return torch.bfloat16
    return torch.float16 if asked in (True, "fp16") else None


def narrowed(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    """What travels: the tensor itself when nothing is to be gained."""
    # the values of a sparse tensor travel with indices, which are most of its bytes
    is_wide = tensor.is_floating_point() and not tensor.is_sparse and tensor.element_size() > 2
    return tensor.to(dtype) if dtype is not None and is_wide else tensor
