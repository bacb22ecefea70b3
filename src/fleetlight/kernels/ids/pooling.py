# SPDX-License-Identifier: Apache-2.0
"""The rows of many features in one kernel: pooled by sample, or one for each id.

A `Pooling` says which rows each feature reads and where its results go. Rows, results and their
gradients are flat arrays, since features have different dims.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from fleetlight.kernels.arrays import Floats, Ids, Int32s, Layout, Positions, Values
from fleetlight.kernels.compiling.kernel import kernel, part

#: how a feature combines rows; WEIGHTED is a sum with a weight for each position
SUM, MEAN, MAX, WEIGHTED, EACH = range(5)
#: the columns of a layout: the first number of the feature's rows, their dim, the mode, the first
#: number of its results, and the distance between two results
ROWS_AT, DIM, MODE, OUT_AT, STEP = range(5)


@dataclasses.dataclass(frozen=True)
class Pooling:
    """The features of one forward.

    Feature f has the positions bounds[f, 0] to bounds[f, -1], of which sample s has those from
    bounds[f, s] to bounds[f, s + 1].
    """

    #: the row of each position among the feature's rows; -1 reads zeros, in the mode EACH only
    inverse: Positions
    bounds: Layout
    #: the weight of each position; empty without weights
    weights: Values
    layout: Layout
    #: the number of all results
    size: int

    @property
    def has_maxima(self) -> bool:
        """True when a feature takes maxima."""
        return bool((self.layout[:, MODE] == MAX).any())


def pool(rows: Values, pooling: Pooling) -> tuple[Floats, Int32s]:
    """The results of all features; of maxima also the row of each number (-1: an empty sample)."""
    out = np.empty(pooling.size, np.float32)
    chosen = np.empty(pooling.size if pooling.has_maxima else 0, np.int32)
    p = pooling
    _pool(rows, p.inverse, p.bounds, p.weights, p.layout, out, chosen)
    return out, chosen


def spread(grads: Values, pooling: Pooling, count: int, chosen: Int32s) -> Floats:
    """The gradient of `count` numbers of rows, from the gradients of all results."""
    out = np.zeros(count, np.float32)
    p = pooling
    _spread(grads, p.inverse, p.bounds, p.weights, p.layout, chosen, out)
    return out


def position_grads(grads: Values, rows: Values, pooling: Pooling) -> Floats:
    """The gradient of the weight of each position; zero where a feature has no weights."""
    out = np.zeros(len(pooling.inverse), np.float32)
    _dot(grads, rows, pooling.inverse, pooling.bounds, pooling.layout, out)
    return out


def wrong_bounds(bounds: Layout, counts: Ids) -> Ids:
    """The features whose bounds do not rise from 0 to their number of ids."""
    rises = (bounds[:, 0] == 0) & (bounds[:, -1] == counts) & (np.diff(bounds) >= 0).all(1)
    return np.flatnonzero(~rises)


@kernel
def _pool(
    rows: Values,
    inverse: Positions,
    bounds: Layout,
    weights: Values,
    layout: Layout,
    out: Floats,
    chosen: Int32s,
) -> None:
    for f in range(len(layout)):
        first, dim, mode = layout[f, ROWS_AT], layout[f, DIM], layout[f, MODE]
        at, step = layout[f, OUT_AT], layout[f, STEP]
        if mode == EACH:
            _copy(rows, inverse[bounds[f, 0] : bounds[f, bounds.shape[1] - 1]], first, dim, at, out)
            continue
        for s in range(bounds.shape[1] - 1):
            start, stop = bounds[f, s], bounds[f, s + 1]
            to = at + s * step
            if mode == MAX:
                _largest(rows, inverse, first, dim, start, stop, to, out, chosen)
            else:
                _weighted(rows, inverse, weights, first, dim, mode, start, stop, to, out)


@part
def _copy(rows: Values, inverse: Positions, first: int, dim: int, at: int, out: Floats) -> None:
    for i in range(len(inverse)):
        to, row = np.uint64(at + i * dim), np.uint64(first + inverse[i] * dim)
        for c in range(dim):
            out[to + np.uint64(c)] = rows[row + np.uint64(c)] if inverse[i] >= 0 else 0


@part
def _weighted(
    rows: Values,
    inverse: Positions,
    weights: Values,
    first: int,
    dim: int,
    mode: int,
    start: int,
    stop: int,
    to: int,
    out: Floats,
) -> None:
    for c in range(dim):
        out[np.uint64(to + c)] = 0
    share = np.float32(1 / (stop - start)) if mode == MEAN else np.float32(1)
    for i in range(start, stop):
        row = np.uint64(first + inverse[i] * dim)
        if mode == WEIGHTED:
            share = weights[i]
        for c in range(dim):
            out[np.uint64(to + c)] += share * rows[row + np.uint64(c)]


@part
def _largest(
    rows: Values,
    inverse: Positions,
    first: int,
    dim: int,
    start: int,
    stop: int,
    to: int,
    out: Floats,
    chosen: Int32s,
) -> None:
    for c in range(dim):
        out[np.uint64(to + c)] = 0
        chosen[np.uint64(to + c)] = -1
    for i in range(start, stop):
        row = np.uint64(first + inverse[i] * dim)
        for c in range(dim):
            value, place = rows[row + np.uint64(c)], np.uint64(to + c)
            # a NaN wins, so that it is not hidden
            if chosen[place] < 0 or value > out[place] or value != value:
                out[place] = value
                chosen[place] = inverse[i]


@kernel
def _spread(
    grads: Values,
    inverse: Positions,
    bounds: Layout,
    weights: Values,
    layout: Layout,
    chosen: Int32s,
    out: Floats,
) -> None:
    for f in range(len(layout)):
        first, dim, mode = layout[f, ROWS_AT], layout[f, DIM], layout[f, MODE]
        at, step = layout[f, OUT_AT], layout[f, STEP]
        if mode == EACH:
            _add_each(
                grads, inverse[bounds[f, 0] : bounds[f, bounds.shape[1] - 1]], at, first, dim, out
            )
            continue
        for s in range(bounds.shape[1] - 1):
            start, stop = bounds[f, s], bounds[f, s + 1]
            place = at + s * step
            if mode == MAX:
                _add_chosen(grads, chosen, place, first, dim, out)
                continue
            share = np.float32(1 / (stop - start)) if mode == MEAN else np.float32(1)
            for i in range(start, stop):
                row = np.uint64(first + inverse[i] * dim)
                if mode == WEIGHTED:
                    share = weights[i]
                for c in range(dim):
                    out[row + np.uint64(c)] += share * grads[np.uint64(place + c)]


@part
def _add_each(
    grads: Values, inverse: Positions, at: int, first: int, dim: int, out: Floats
) -> None:
    for i in range(len(inverse)):
        if inverse[i] >= 0:
            row, place = np.uint64(first + inverse[i] * dim), np.uint64(at + i * dim)
            for c in range(dim):
                out[row + np.uint64(c)] += grads[place + np.uint64(c)]


@part
def _add_chosen(
    grads: Values, chosen: Int32s, place: int, first: int, dim: int, out: Floats
) -> None:
    for c in range(dim):
        row = chosen[np.uint64(place + c)]
        if row >= 0:
            out[np.uint64(first + row * dim + c)] += grads[np.uint64(place + c)]


@kernel
def _dot(
    grads: Values, rows: Values, inverse: Positions, bounds: Layout, layout: Layout, out: Floats
) -> None:
    for f in range(len(layout)):
        if layout[f, MODE] != WEIGHTED:
            continue
        for s in range(bounds.shape[1] - 1):
            place = layout[f, OUT_AT] + s * layout[f, STEP]
            for i in range(bounds[f, s], bounds[f, s + 1]):
                row = layout[f, ROWS_AT] + inverse[i] * layout[f, DIM]
                for c in range(layout[f, DIM]):
                    out[i] += grads[np.uint64(place + c)] * rows[np.uint64(row + c)]
