# SPDX-License-Identifier: Apache-2.0
"""Where the numbers of a gradient lie: fused steps go through memory from end to end."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_library: Any = torch.library.Library("fleetlight", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define("laid_out(Tensor gradient, Tensor parameter) -> Tensor")


def laid_out(gradient: Tensor, parameter: Tensor) -> Tensor:
    """The gradient with its numbers in the order of the parameter's: itself, or a copy."""
    if gradient.stride() == parameter.stride():
        return gradient
    if gradient.is_contiguous() and parameter.is_contiguous():
        # they differ in dimensions of size 1
        return gradient
    return torch.empty_like(parameter).copy_(gradient)


_library.impl("laid_out", laid_out, "CompositeExplicitAutograd")

LAID_OUT = torch.ops.fleetlight.laid_out.default


def is_dense(tensor: Tensor) -> bool:
    """Whether the numbers fill the memory from the first to the last, each once."""
    dense: bool = torch.ops.aten.is_non_overlapping_and_dense(tensor)
    return dense
