# SPDX-License-Identifier: Apache-2.0
"""Whether all values of an array are finite: asked of every gradient, so it must cost little."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleetlight.kernels.arrays import Positions
from fleetlight.kernels.compiling import kernel

#: the bits of a float32 without its sign: infinity has these, a NaN more
_INFINITY = 0x7F800000


def all_finite(array: NDArray[Any]) -> bool:
    """False when there is a NaN or an infinity in it."""
    if array.dtype == np.float32 and array.flags.c_contiguous:
        return _largest(array.reshape(-1).view(np.int32)) < _INFINITY
    return bool(np.isfinite(array).all())


@kernel
def _largest(bits: Positions) -> int:
    """Of the values without their signs; as integers they compare like the floats they are."""
    largest = np.int32(0)
    for i in range(len(bits)):
        largest = max(largest, bits[i] & np.int32(0x7FFFFFFF))
    return largest
