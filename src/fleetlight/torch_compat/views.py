# SPDX-License-Identifier: Apache-2.0
"""Tensors whose elements share memory, such as expanded ones.

Why: torch refuses to write into such a tensor as a whole, and no public name gives the part that
can be written to.
"""

from __future__ import annotations

from torch import Tensor


def distinct_elements(tensor: Tensor) -> Tensor:
    """A view that has each element of an expanded tensor once."""
    if tensor.is_contiguous():
        return tensor
    return tensor[_once(tensor)]


def assign(tensor: Tensor, values: Tensor) -> None:
    """Write values of the same shape, of which those that share memory are equal."""
    once = _once(tensor)
    tensor[once].copy_(values[once])


def _once(tensor: Tensor) -> tuple[slice, ...]:
    return tuple(slice(1) if stride == 0 else slice(None) for stride in tensor.stride())
