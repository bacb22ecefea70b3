# SPDX-License-Identifier: Apache-2.0
"""Bags of rows: the sum, mean or maximum of the rows of a sample, and their gradients.

Bag b has the positions offsets[b] to offsets[b + 1]; `inverse` is the row of each position. An
empty bag is zero.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import ArrayLike

from fleetlight.errors import ConfigError, did_you_mean
from fleetlight.kernels.arrays import (
    Choices,
    Floats,
    Grid,
    Ids,
    Matrix,
    Positions,
    Values,
    as_grid,
    as_ids,
    room,
)
from fleetlight.kernels.compiling.kernel import kernel
from fleetlight.kernels.ids.gathering import positions_below

Mode = Literal["sum", "mean", "max"]
MODES = ("sum", "mean", "max")


def gather_bags(
    rows: ArrayLike,
    inverse: ArrayLike,
    offsets: ArrayLike,
    weights: ArrayLike | None = None,
    mode: Mode = "sum",
    out: Matrix | None = None,
) -> tuple[Matrix, Choices | None]:
    """One row for each bag; for "max" also the source row of each value (-1: an empty bag)."""
    rows = np.asarray(rows)
    rows = as_grid(rows, rows.shape[-1], "rows")
    inverse, offsets = positions_below(inverse, len(rows)), _checked(offsets, inverse)
    shares = _shares(offsets, weights, mode)
    out = room(out, (len(offsets) - 1, rows.shape[1]))
    if mode == "max":
        chosen = np.empty(out.shape, np.int32)
        _maximum(rows, inverse, offsets, out, chosen)
        return out, chosen
    _weighted(rows, inverse, offsets, shares, out)
    return out, None


def spread_bags(
    grads: ArrayLike,
    inverse: ArrayLike,
    offsets: ArrayLike,
    weights: ArrayLike | None = None,
    mode: Mode = "sum",
    count: int = 0,
    chosen: Choices | None = None,
    out: Matrix | None = None,
) -> Matrix:
    """The gradients of `count` rows from the gradients of bags; "max" needs `chosen`."""
    inverse, offsets = positions_below(inverse, count), _checked(offsets, inverse)
    shares = _shares(offsets, weights, mode)
    grads = np.asarray(grads)
    grads = as_grid(grads, grads.shape[-1], "gradients of bags", rows=len(offsets) - 1)
    out = room(out, (count, grads.shape[1]))
    out.fill(0)
    if mode != "max":
        _spread(grads, inverse, offsets, shares, out)
    elif chosen is None or chosen.shape != grads.shape:
        raise ConfigError(
            "spread_bags with mode='max' needs chosen=, the second result of gather_bags"
        )
    else:
        positions_below(np.maximum(chosen, 0), max(count, 1))
        _spread_chosen(grads, np.ascontiguousarray(chosen, np.int32), out)
    return out


def weight_grads(
    grads: ArrayLike, rows: ArrayLike, inverse: ArrayLike, offsets: ArrayLike
) -> Floats:
    """The gradient of each position's weight in a weighted sum."""
    rows = np.asarray(rows)
    rows = as_grid(rows, rows.shape[-1], "rows")
    inverse, offsets = positions_below(inverse, len(rows)), _checked(offsets, inverse)
    grads = as_grid(grads, rows.shape[1], "gradients of bags", rows=len(offsets) - 1)
    out = np.zeros(len(inverse), np.float32)
    _dot(grads, rows, inverse, offsets, out)
    return out


def _checked(offsets: ArrayLike, inverse: ArrayLike) -> Ids:
    """Offsets that cover all positions."""
    offsets, count = as_ids(offsets), len(np.asarray(inverse).reshape(-1))
    through = len(offsets) > 0 and offsets[0] == 0 and offsets[-1] == count
    if not through or (np.diff(offsets) < 0).any():
        raise ConfigError(
            f"offsets {_shortened(offsets)} over {count} positions: expected to rise from 0 to "
            f"{count}, one more than there are bags"
        )
    return offsets


def _shortened(offsets: Ids) -> str:
    return np.array2string(offsets, threshold=8, edgeitems=3)


def _shares(offsets: Ids, weights: ArrayLike | None, mode: str) -> Values:
    """The factor of each position in its bag: its weight, or 1, or 1 / the bag's length."""
    if mode not in MODES:
        raise ConfigError(f"mode {mode!r}: {did_you_mean(mode, MODES)}")
    count = int(offsets[-1])
    if weights is None:
        lengths = np.diff(offsets)
        share = 1 / np.maximum(lengths, 1) if mode == "mean" else np.ones(len(lengths))
        return np.repeat(share.astype(np.float32), lengths)
    if mode != "sum":
        raise ConfigError(f"weights with mode={mode!r}, expected mode='sum' as in torch")
    shares = np.ascontiguousarray(weights, np.float32).reshape(-1)
    if len(shares) != count:
        raise ConfigError(f"{len(shares)} weights for {count} positions, expected one for each")
    return shares


@kernel
def _weighted(rows: Grid, inverse: Positions, offsets: Ids, shares: Values, out: Matrix) -> None:
    for b in range(len(offsets) - 1):
        for c in range(rows.shape[1]):
            out[b, c] = 0
        for i in range(offsets[b], offsets[b + 1]):
            row, share = np.uint64(inverse[i]), shares[i]
            for c in range(rows.shape[1]):
                out[b, c] += share * rows[row, c]


@kernel
def _maximum(rows: Grid, inverse: Positions, offsets: Ids, out: Matrix, chosen: Choices) -> None:
    for b in range(len(offsets) - 1):
        for c in range(rows.shape[1]):
            out[b, c] = 0
            chosen[b, c] = -1
        for i in range(offsets[b], offsets[b + 1]):
            row = np.uint64(inverse[i])
            for c in range(rows.shape[1]):
                value = rows[row, c]
                # a NaN wins, so that it is not hidden
                if chosen[b, c] < 0 or value > out[b, c] or value != value:
                    out[b, c] = value
                    chosen[b, c] = inverse[i]


@kernel
def _spread(grads: Grid, inverse: Positions, offsets: Ids, shares: Values, out: Matrix) -> None:
    for b in range(len(offsets) - 1):
        for i in range(offsets[b], offsets[b + 1]):
            row, share = np.uint64(inverse[i]), shares[i]
            for c in range(grads.shape[1]):
                out[row, c] += share * grads[b, c]


@kernel
def _spread_chosen(grads: Grid, chosen: Choices, out: Matrix) -> None:
    for b in range(grads.shape[0]):
        for c in range(grads.shape[1]):
            if chosen[b, c] >= 0:
                out[np.uint64(chosen[b, c]), np.uint64(c)] += grads[b, c]


@kernel
def _dot(grads: Grid, rows: Grid, inverse: Positions, offsets: Ids, out: Floats) -> None:
    for b in range(len(offsets) - 1):
        for i in range(offsets[b], offsets[b + 1]):
            row = np.uint64(inverse[i])
            for c in range(grads.shape[1]):
                out[i] += grads[b, c] * rows[row, c]
