# SPDX-License-Identifier: Apache-2.0
"""The kernels of codecs in plain NumPy: the oracle of their tests."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fleetlight.kernels.arrays import Codes, Floats, Grid, Int8s, Int32s, Matrix, Positions, Values
from fleetlight.kernels.ids.hashing import GAMMA, mix

_BLOCK = 256
_UNSIGNED = np.int32(0x7FFFFFFF)


def to_blocks(values: Floats, residual: Floats | None, scales: Floats, codes: Int8s) -> None:
    """Encode each block separately; a block with a NaN or an infinity keeps its error."""
    if residual is not None:
        values += residual
    for number, scale in enumerate(_scales(values)):
        block = slice(number * _BLOCK, (number + 1) * _BLOCK)
        scales[number] = scale
        if np.isnan(scale):
            codes[block] = 0
            continue
        inverse = np.float32(1) / scale if scale > 0 else np.float32(0)
        codes[block] = np.rint(values[block] * inverse)
        if residual is not None:
            residual[block] = values[block] - codes[block] * scale


def _scales(values: Values) -> list[np.float32]:
    """The scale of each block: NaN if values are not finite, 0 if they are too small."""
    most = [np.abs(values[n : n + _BLOCK]).max() for n in range(0, len(values), _BLOCK)]
    found = [m / np.float32(127) if m >= np.float32(1e-36) else np.float32(0) for m in most]
    return [
        s if m <= np.float32(3.4e38) else np.float32(np.nan)
        for s, m in zip(found, most, strict=True)
    ]


def add_blocks(scales: Values, codes: Codes, total: Floats) -> None:
    """Each code times the scale of its block."""
    total += codes * np.repeat(scales, _BLOCK)[: len(codes)]


def largest(values: Values, places: Int32s) -> None:
    """A stable sort by the bits without the sign, the largest first."""
    order = np.argsort(-(values.view(np.int32) & _UNSIGNED), kind="stable")
    places[:] = np.sort(order[: len(places)])


def take_out(values: Floats, places: Positions, taken: Floats) -> None:
    """A copy, then zeros."""
    taken[:] = values[places]
    values[places] = 0


def add_at(places: Positions, values: Values, total: Floats) -> None:
    """Places may repeat."""
    np.add.at(total, places, values)


def to_bfloat16(rows: Grid) -> Matrix:
    """The nearest values with 8 significant bits."""
    return _nearest(rows, 8, -126, float(np.float32(2.0**127 * (2 - 2.0**-7))))


def to_float16(rows: Grid) -> Matrix:
    """The nearest values with 11 significant bits, or multiples of 2**-24."""
    return _nearest(rows, 11, -14, 65504.0)


def _nearest(rows: Grid, bits: int, lowest: int, most: float) -> Matrix:
    """Round in double precision; finite values stay within `most`."""
    wide = rows.astype(np.float64)
    finite = np.isfinite(wide)
    exponents = np.frexp(np.where(finite, wide, 0))[1] - 1
    units = np.ldexp(1.0, np.maximum(exponents, lowest) - (bits - 1))
    rounded = np.clip(np.rint(np.where(finite, wide, 0) / units) * units, -most, most)
    return np.where(finite, rounded, wide).astype(np.float32)


def to_int8(rows: Grid, seed: int | None) -> tuple[NDArray[np.int8], Floats]:
    """Codes, and scales of 17 significant bits; a row that is not finite has the scale NaN."""
    most = np.abs(rows).max(1, initial=0)
    mantissas, exponents = np.frexp(most / np.float32(127))
    scales = np.ldexp(np.ceil(mantissas * 2**17) / np.float32(2**17), exponents)
    scales = np.minimum(scales, np.float32(2.0**121 * (1 + 2.0**-7)))
    scales = np.where(most < np.float32(2e-36), 0, scales).astype(np.float32)
    inverse = np.divide(1, scales, where=scales > 0, out=np.zeros_like(scales))
    finite = np.isfinite(most)
    values = np.where(finite[:, None], rows, 0) * np.where(finite, inverse, 0)[:, None]
    codes = np.clip(_whole(values, seed), -127, 127).astype(np.int8)
    return codes, np.where(finite, scales, np.float32(np.nan))


def _whole(values: Grid, seed: int | None) -> Matrix:
    if seed is None:
        return np.rint(values)
    words = mix(np.uint64(seed) + np.arange(-(-values.size // 4), dtype=np.uint64) * GAMMA)
    noise = words.view(np.uint16)[: values.size].reshape(values.shape)
    below = np.floor(values)
    return below + (noise < (values - below) * np.float32(65536))
