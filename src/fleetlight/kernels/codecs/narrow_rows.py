# SPDX-License-Identifier: Apache-2.0
"""Rows of float32 as bfloat16, as float16, or as int8 codes with a scale for each row.

With a seed, float16 and int8 round at random: up with a probability of the distance from the value
below, so that the mean is exact. The same seed gives the same bits. Without, all forms round to the
nearest value; what they decode to then encodes to the same bits.

NaN and infinity stay so; in int8, they make the row NaN. A finite value beyond the range of a form
becomes its largest value.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fleetlight.kernels.arrays import (
    Codes,
    Floats,
    Grid,
    Int8s,
    Matrix,
    Positions,
    Uint16s,
    Uint32s,
    Uint64s,
    Values,
    Words,
)
from fleetlight.kernels.compiling.kernel import kernel, part
from fleetlight.kernels.ids.hashing import GAMMA, mix

_UNSIGNED = 0x7FFFFFFF
_INFINITY = 0x7F800000  #: its bits; those of a NaN are larger
#: from here on, rounding to bfloat16 gives infinity
_OVER_BFLOAT16, _MOST_BFLOAT16 = 0x7F7F8000, 0x7F7F
#: 2**-14, the smallest float16 with all bits; smaller ones are multiples of 2**-24
_NORMAL_FLOAT16, _UNIT = 0x38800000, np.float32(2.0**24)
_MAX_FLOAT16, _INFINITE_FLOAT16 = 0x7BFF, 0x7C00
_REBIAS = 112 << 23  #: the difference of the biases of float32 and float16
_MAX_CODE = 127
#: a row whose largest value is below it becomes zeros: its scale would be subnormal
_MIN_VALUE = np.float32(2e-36)
#: The largest scale. A scale has 17 significant bits, so codes times scales are exact.
_MAX_SCALE = np.float32(2.0**121 * (1 + 2.0**-7))
_CUT = 0x7F  #: the bits of a scale that are cut off


def to_bfloat16(rows: Grid, out: NDArray[np.uint16] | None = None) -> NDArray[np.uint16]:
    """The bits of the nearest bfloat16 of each value, in `out` if given."""
    rows = np.ascontiguousarray(rows)
    out = np.empty(rows.shape, np.uint16) if out is None else out
    _to_bfloat16(rows.reshape(-1).view(np.int32), out.reshape(-1))
    return out


def from_bfloat16(words: NDArray[np.uint16]) -> Matrix:
    """The values of bfloat16 bits."""
    out = np.empty(words.shape, np.float32)
    _from_bfloat16(words.reshape(-1), out.reshape(-1).view(np.uint32))
    return out


def to_float16(
    rows: Grid, seed: int | None = None, out: NDArray[np.float16] | None = None
) -> NDArray[np.float16]:
    """Each value as float16, in `out` if given."""
    out = np.empty(rows.shape, np.float16) if out is None else out
    flat = np.ascontiguousarray(rows).reshape(-1)
    bits = out.view(np.uint16).reshape(-1)
    _to_float16(flat, flat.view(np.int32), _noise(seed, rows.size), bits)
    return out


def to_int8(
    rows: Grid,
    seed: int | None = None,
    codes: NDArray[np.int8] | None = None,
    scales: Floats | None = None,
) -> tuple[NDArray[np.int8], Floats]:
    """Codes from -127 to 127, and the scale of each row, in these arrays if given."""
    codes = np.empty(rows.shape, np.int8) if codes is None else codes
    scales = np.empty(len(rows), np.float32) if scales is None else scales
    rows = np.ascontiguousarray(rows)
    _to_int8(rows, _noise(seed, rows.size), scales, scales.view(np.uint32), codes.reshape(-1))
    return codes, scales


def from_int8(codes: NDArray[np.int8], scales: Values) -> Matrix:
    """Codes times the scale of their row."""
    out = np.empty(codes.shape, np.float32)
    _from_int8(codes.reshape(-1), scales, out)
    return out


def _noise(seed: int | None, count: int) -> NDArray[np.uint16]:
    """16 random bits for each value; none without a seed."""
    if seed is None:
        return np.empty(0, np.uint16)
    words = np.empty(-(-count // 4), np.uint64)
    _fill(seed, words)
    return words.view(np.uint16)[:count]


@kernel
def _fill(seed: int, words: Uint64s) -> None:
    for i in range(len(words)):
        words[i] = mix(np.uint64(seed) + np.uint64(i) * GAMMA)


@kernel
def _to_bfloat16(bits: Positions, out: Uint16s) -> None:
    for i in range(len(bits)):
        size = bits[i] & np.int32(_UNSIGNED)
        word = (size + 0x7FFF + ((size >> 16) & 1)) >> 16
        if size >= _OVER_BFLOAT16:
            word = _MOST_BFLOAT16
        if size >= _INFINITY:
            # the last bit of a NaN may be one of those that are cut off
            word = (size >> 16) | (0x40 if size > _INFINITY else 0)
        out[i] = np.uint16(word | ((bits[i] >> 16) & 0x8000))


@kernel
def _from_bfloat16(words: Words, bits: Uint32s) -> None:
    for i in range(len(words)):
        bits[i] = np.uint32(words[i]) << np.uint32(16)


@kernel
def _to_float16(values: Values, bits: Positions, noise: Words, out: Uint16s) -> None:
    """Adds random bits below the last one, or half of it, and cuts them off."""
    for i in range(len(values)):
        size = bits[i] & np.int32(_UNSIGNED)
        even = (size >> 13) & 1
        more = 0xFFF + even if len(noise) == 0 else np.int64(noise[i]) >> 3
        word = (size - _REBIAS + more) >> 13
        if size < _NORMAL_FLOAT16:
            word = _whole(abs(values[i]) * _UNIT, noise, i)
        word = min(word, _MAX_FLOAT16)
        if size >= _INFINITY:
            word = _INFINITE_FLOAT16 + (0x200 if size > _INFINITY else 0)
        out[i] = np.uint16(word | ((bits[i] >> 16) & 0x8000))


@part
def _whole(value: np.float32, noise: Words, i: int) -> int:
    """Round to a whole number."""
    if len(noise) == 0:
        return int(np.rint(value))
    below = np.floor(value)
    return int(below) + int(np.float32(noise[i]) < (value - below) * np.float32(65536))


@kernel
def _to_int8(rows: Grid, noise: Words, scales: Floats, bits: Uint32s, codes: Int8s) -> None:
    """`bits` views the scales as integers."""
    dim = rows.shape[1]
    for r in range(len(rows)):
        most, is_finite = np.float32(0), True
        for c in range(dim):
            size = abs(rows[r, c])
            is_finite &= size < np.inf
            most = max(most, size)
        scale = np.float32(0)
        if most >= _MIN_VALUE:
            scales[r] = most / np.float32(_MAX_CODE)
            bits[r] = (bits[r] + np.uint32(_CUT)) & np.uint32(~_CUT & 0xFFFFFFFF)
            scale = min(scales[r], _MAX_SCALE)
        inverse = np.float32(1) / scale if scale > 0 and is_finite else np.float32(0)
        scales[r] = scale if is_finite else np.float32(np.nan)
        for c in range(dim):
            at = r * dim + c
            code = _whole(rows[r, c] * inverse, noise, at) if is_finite else 0
            codes[at] = np.int8(min(max(code, -_MAX_CODE), _MAX_CODE))


@kernel
def _from_int8(codes: Codes, scales: Values, out: Matrix) -> None:
    dim = out.shape[1]
    for r in range(len(scales)):
        for c in range(dim):
            out[r, c] = np.float32(codes[r * dim + c]) * scales[r]
