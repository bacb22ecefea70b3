# SPDX-License-Identifier: Apache-2.0
"""The kernels of codecs in plain NumPy: the oracle of their tests."""

from __future__ import annotations

import numpy as np

from fleetlight.kernels.arrays import Codes, Floats, Int8s, Int32s, Positions, Values

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
