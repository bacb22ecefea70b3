# SPDX-License-Identifier: Apache-2.0
"""Converts tensors to flat NumPy arrays and back, for the dtypes that the wire carries."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

#: names of torch dtypes on the wire
NAMES: dict[torch.dtype, str] = {
    torch.float32: "float32",
    torch.float64: "float64",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
}


def numpy_dtype(name: str) -> np.dtype[Any]:
    """The NumPy dtype for a torch dtype; bfloat16 travels as its bits."""
    return np.dtype(np.uint16 if name == "bfloat16" else name)


def flat_array(tensor: Tensor) -> NDArray[Any]:
    """Values of a tensor in order, as a view where possible."""
    flat = tensor.detach().reshape(-1).to("cpu")
    array: NDArray[Any] = (
        flat.view(torch.uint16) if flat.dtype == torch.bfloat16 else flat
    ).numpy()
    return array


def as_tensor(values: NDArray[Any], dtype: torch.dtype) -> Tensor:
    """Inverse of `flat_array`."""
    # a received array may be read-only, which torch cannot express
    tensor = torch.from_numpy(values if values.flags.writeable else values.copy())
    return tensor.view(torch.bfloat16) if dtype == torch.bfloat16 else tensor


def bfloat16_sum(arrays: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """Sum bfloat16 values that are stored as their bits."""
    total = as_tensor(arrays[0], torch.bfloat16)
    for array in arrays[1:]:
        total += as_tensor(array, torch.bfloat16)
    return arrays[0]
