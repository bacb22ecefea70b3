# SPDX-License-Identifier: Apache-2.0
"""Values as int8 codes: each block of 256 has a scale that maps its largest magnitude to 127.

Error feedback adds the rounding error of a block to its next values. A block with a NaN or an
infinity gets NaN as its scale: all its values decode to NaN, and its error does not change.
"""

from __future__ import annotations

import numpy as np

from fleetlight.kernels.arrays import Codes, Floats, Int8s, Int32s, Values
from fleetlight.kernels.codecs.magnitudes import largest_bits
from fleetlight.kernels.compiling.kernel import kernel, part

BLOCK = 256
_MAX_CODE = 127
#: above it, 127 times the scale may be infinite
_MAX_VALUE = np.float32(3.4e38)
#: below it, a scale has no inverse; such values accumulate in the error
_MIN_VALUE = np.float32(1e-36)


def block_count(values: int) -> int:
    """The number of blocks of `values` values."""
    return -(-values // BLOCK)


def to_blocks(values: Floats, residual: Floats | None, scales: Floats, codes: Int8s) -> None:
    """Encode values plus `residual` as codes and scales; `residual` becomes the new error.

    Afterwards `values` has the sums that were encoded.
    """
    kept = np.empty(0, np.float32) if residual is None else residual
    _to_blocks(values, values.view(np.int32), kept, scales, codes)


def add_blocks(scales: Values, codes: Codes, total: Floats) -> None:
    """Decode codes and scales, and add the values to a total."""
    _add_blocks(scales, codes, total)


@kernel
def _to_blocks(
    values: Floats, bits: Int32s, residual: Floats, scales: Floats, codes: Int8s
) -> None:
    """`bits` views the values as integers, which compare like floats without their sign.

    Each operation on a block has a loop of its own, so that the compiler vectorises it.
    """
    top = np.zeros(1, np.int32)
    for b in range(len(scales)):
        start, stop = b * BLOCK, (b + 1) * BLOCK
        mine, out, kept = values[start:stop], codes[start:stop], residual[start:stop]
        for i in range(len(kept)):
            mine[i] += kept[i]
        top[0] = largest_bits(bits[start:stop])
        most = top.view(np.float32)[0]
        if not most <= _MAX_VALUE:
            scales[b] = np.nan
            out[:] = 0
            continue
        scale = most / np.float32(_MAX_CODE) if most >= _MIN_VALUE else np.float32(0)
        scales[b] = scale
        _round(mine, np.float32(1) / scale if scale > 0 else np.float32(0), out)
        for i in range(len(kept)):
            kept[i] = mine[i] - np.float32(out[i]) * scale


@part
def _round(values: Values, inverse: np.float32, codes: Int8s) -> None:
    for i in range(len(codes)):
        # the processor converts floats to 32 bits
        codes[i] = np.int8(np.int32(np.rint(values[i] * inverse)))


@kernel
def _add_blocks(scales: Values, codes: Codes, total: Floats) -> None:
    for b in range(len(scales)):
        scale, start, stop = scales[b], b * BLOCK, (b + 1) * BLOCK
        mine, sums = codes[start:stop], total[start:stop]
        for i in range(len(sums)):
            sums[i] += np.float32(mine[i]) * scale
