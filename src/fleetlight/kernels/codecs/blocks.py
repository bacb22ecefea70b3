# SPDX-License-Identifier: Apache-2.0
"""Values as bytes: blocks of 256 with a scale each, by which the largest of a block is 127.

What rounding leaves is kept and added the next time. A block that has a NaN or an infinity has no
scale: all of it is read as NaN, and what was kept of it stays.
"""

from __future__ import annotations

import numpy as np

from fleetlight.kernels.arrays import Codes, Floats, Int8s, Int32s, Values
from fleetlight.kernels.codecs.magnitudes import largest_bits
from fleetlight.kernels.compiling.kernel import kernel, part

BLOCK = 256
_MOST = 127
#: beyond it, 127 times the scale may be infinite
_LARGEST = np.float32(3.4e38)
#: below it, a scale has no inverse; such values wait until they have added up
_SMALLEST = np.float32(1e-36)


def block_count(values: int) -> int:
    """How many blocks so many values have."""
    return -(-values // BLOCK)


def to_blocks(values: Floats, owed: Floats | None, scales: Floats, codes: Int8s) -> None:
    """Write values, with what is owed of them, as codes and scales; `owed` is what is left.

    `values` holds afterwards what was to be written.
    """
    kept = np.empty(0, np.float32) if owed is None else owed
    _to_blocks(values, values.view(np.int32), kept, scales, codes)


def add_blocks(scales: Values, codes: Codes, total: Floats) -> None:
    """Add what was written to a total."""
    _add_blocks(scales, codes, total)


@kernel
def _to_blocks(values: Floats, bits: Int32s, owed: Floats, scales: Floats, codes: Int8s) -> None:
    """`bits` are the values once more: as integers without sign they compare as the floats do.

    A loop for each thing that is done to a block, so that the compiler does it to many values
    at once.
    """
    top = np.zeros(1, np.int32)
    for b in range(len(scales)):
        start, stop = b * BLOCK, (b + 1) * BLOCK
        mine, out, kept = values[start:stop], codes[start:stop], owed[start:stop]
        for i in range(len(kept)):
            mine[i] += kept[i]
        top[0] = largest_bits(bits[start:stop])
        most = top.view(np.float32)[0]
        if not most <= _LARGEST:
            scales[b] = np.nan
            out[:] = 0
            continue
        scale = most / np.float32(_MOST) if most >= _SMALLEST else np.float32(0)
        scales[b] = scale
        _round(mine, np.float32(1) / scale if scale > 0 else np.float32(0), out)
        for i in range(len(kept)):
            kept[i] = mine[i] - np.float32(out[i]) * scale


@part
def _round(values: Values, inverse: np.float32, codes: Int8s) -> None:
    for i in range(len(codes)):
        # by way of 32 bits, for which there is an instruction
        codes[i] = np.int8(np.int32(np.rint(values[i] * inverse)))


@kernel
def _add_blocks(scales: Values, codes: Codes, total: Floats) -> None:
    for b in range(len(scales)):
        scale, start, stop = scales[b], b * BLOCK, (b + 1) * BLOCK
        mine, sums = codes[start:stop], total[start:stop]
        for i in range(len(sums)):
            sums[i] += np.float32(mine[i]) * scale
