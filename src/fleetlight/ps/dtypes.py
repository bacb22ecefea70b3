# SPDX-License-Identifier: Apache-2.0
"""Tensors as flat arrays and back: what of a dtype of torch NumPy and the wire can hold."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

#: how the dtypes of torch are called on the wire, and what NumPy holds them in
NAMES: dict[torch.dtype, str] = {
    torch.float32: "float32",
    torch.float64: "float64",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
}


def numpy_dtype(name: str) -> np.dtype[Any]:
    """What NumPy holds a dtype of torch in: bfloat16 travels as its bits."""
    return np.dtype(np.uint16 if name == "bfloat16" else name)


def flat_array(tensor: Tensor) -> NDArray[Any]:
    """A tensor's values in order; a view where that is possible."""
    flat = tensor.detach().reshape(-1).to("cpu")
    array: NDArray[Any] = (
        flat.view(torch.uint16) if flat.dtype == torch.bfloat16 else flat
    ).numpy()
    return array


def as_tensor(values: NDArray[Any], dtype: torch.dtype) -> Tensor:
    """The way back of `flat_array`."""
    # what has arrived may be read-only, which torch cannot express
    tensor = torch.from_numpy(values if values.flags.writeable else values.copy())
    return tensor.view(torch.bfloat16) if dtype == torch.bfloat16 else tensor


def bfloat16_sum(arrays: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """The sum of bfloat16 values that are held as their bits."""
    total = as_tensor(arrays[0], torch.bfloat16)
    for array in arrays[1:]:
        total += as_tensor(array, torch.bfloat16)
    return arrays[0]
