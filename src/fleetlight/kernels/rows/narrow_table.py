# SPDX-License-Identifier: Apache-2.0
"""`NarrowRowTable`: weights as bfloat16, two in each float of a row; state and metadata as float32.

An update computes in float32 and rounds the new weights up or down at random, so that many small
updates are not lost. The random bits are a function of seed, step, id and gradient: a server that
repeats its log gets the same rows.
"""

from __future__ import annotations

import functools
from typing import TypeAlias

import numpy as np

from fleetlight.kernels.arrays import (
    Doubles,
    Floats,
    Grid,
    Ids,
    Int64s,
    Matrix,
    Positions,
    Uint16s,
    Uint32s,
    Values,
    Words,
    as_grid,
)
from fleetlight.kernels.codecs.narrow_rows import from_bfloat16, to_bfloat16
from fleetlight.kernels.compiling.kernel import Kernel, kernel, part
from fleetlight.kernels.ids.hashing import GAMMA, hash_of, mix
from fleetlight.kernels.rows.first_values import as_int64, first_values
from fleetlight.kernels.rows.row_access import ahead, ask
from fleetlight.kernels.rows.table import RowTable
from fleetlight.kernels.rows.updates import bound_step, numbers_of
from fleetlight.kernels.rule import Step

Update: TypeAlias = Kernel[
    [Floats, Uint16s, int, Ids, Ids, Values, Positions, Doubles, int, Floats, Uint32s, int], None
]


class NarrowRowTable(RowTable):
    """Half the memory of the weights; files and callers have float32."""

    @staticmethod
    def _weights_width(dim: int) -> int:
        return (dim + 1) // 2

    @property
    def _words(self) -> Uint16s:
        return self._slab.flat.view(np.uint16)

    def whole(self, rows: Matrix) -> Matrix:
        """See `RowTable`."""
        words = np.ascontiguousarray(rows[:, : self.weights_width]).view(np.uint16)
        weights = from_bfloat16(np.ascontiguousarray(words[:, : self.dim]))
        return np.concatenate([weights, rows[:, self.weights_width :]], axis=1)

    def learn(self, numbers: Int64s, grads: Grid, hyper: Doubles) -> None:  # type: ignore[override]
        """See `RowTable`."""
        self._change(numbers, self.ids_of(numbers), grads, hyper, 0)

    def _packed(self, whole: Grid) -> Grid:
        return np.concatenate([self._weights(whole[:, : self.dim]), whole[:, self.dim :]], axis=1)

    def _write_weights(self, numbers: Int64s, weights: Grid) -> None:
        """Replace the weights of rows; they round to the nearest value."""
        self._slab.rows[numbers, : self.weights_width] = self._weights(weights)

    def _weights(self, weights: Grid) -> Matrix:
        """Weights as they are stored."""
        words = np.zeros((len(weights), 2 * self.weights_width), np.uint16)
        words[:, : self.dim] = to_bfloat16(weights)
        return words.view(np.float32)

    def _read(self, numbers: Int64s, out: Matrix) -> None:
        bits = out.reshape(-1).view(np.uint32)
        _read(self._slab.flat, self._words, self.width, numbers, self.dim, bits)

    def _read_unknown(self, numbers: Int64s, ids: Ids, out: Matrix) -> None:
        super()._read_unknown(numbers, ids, out)
        unknown = numbers < 0
        out[unknown] = from_bfloat16(to_bfloat16(out[unknown]))

    def _begin(self, numbers: Int64s, ids: Ids, fresh: Int64s) -> None:
        super()._begin(numbers, ids, fresh)
        weights = first_values(ids[fresh], self.dim, self.seed, self.initializer)
        self._write_weights(numbers[fresh], weights)

    def _change(self, numbers: Int64s, ids: Ids, grads: Grid, hyper: Doubles, step: int) -> None:
        row = np.empty(self.dim + self.state_width, np.float32)
        flat = as_grid(grads, self.dim, "gradients", rows=len(numbers)).reshape(-1)
        update = _update_by(self.rule.name, self.rule.step)
        update(
            self._slab.flat,
            self._words,
            self.width,
            numbers,
            ids,
            flat,
            flat.view(np.int32),
            hyper,
            self.dim,
            row,
            row.view(np.uint32),
            as_int64(self.seed ^ step * int(GAMMA)),
        )


@kernel
def _read(slab: Floats, words: Words, width: int, numbers: Ids, dim: int, out: Uint32s) -> None:
    """Read the weights of each row as the bits of float32; -1 reads row 0."""
    early = ahead(dim)
    for i in range(len(numbers)):
        if i + early < len(numbers):
            at = np.uint64(max(numbers[i + early], 0)) * np.uint64(width)
            ask(slab, at, (dim + 1) // 2)
        first = 2 * max(numbers[i], 0) * width
        for c in range(dim):
            out[i * dim + c] = np.uint32(words[first + c]) << np.uint32(16)


@functools.cache
def _update_by(name: str, step: Step) -> Update:
    return _update.variant(f"update_narrow_by_{name}", bound_step=step)


@kernel
def _update(
    slab: Floats,
    words: Uint16s,
    width: int,
    numbers: Ids,
    ids: Ids,
    grads: Values,
    grad_bits: Positions,
    hyper: Doubles,
    dim: int,
    row: Floats,
    bits: Uint32s,
    seed: int,
) -> None:
    """Update a copy of each row in float32, `row`, whose bits are `bits`; then store it."""
    h = numbers_of(hyper)
    early, state = ahead(width), len(row) - dim
    for i in range(len(numbers)):
        if i + early < len(numbers):
            ask(slab, np.uint64(numbers[i + early]) * np.uint64(width), width)
        at = numbers[i] * width
        after = at + (dim + 1) // 2
        for c in range(dim):
            bits[c] = np.uint32(words[2 * at + c]) << np.uint32(16)
        for c in range(state):
            row[dim + c] = slab[after + c]
        bound_step(row, np.uint64(0), np.uint64(dim), grads, np.uint64(i) * np.uint64(dim), h)
        for c in range(state):
            slab[after + c] = row[dim + c]
        stream = mix(hash_of(ids[i]) ^ np.uint64(seed)) ^ np.uint64(grad_bits[i * dim])
        noise = np.uint64(0)
        for c in range(dim):
            if c % 4 == 0:
                noise = mix(stream + np.uint64(c) * GAMMA)
            words[2 * at + c] = _rounded(bits[c], noise & np.uint64(0xFFFF))
            noise >>= np.uint64(16)


@part
def _rounded(value: np.uint32, noise: np.uint64) -> np.uint16:
    """Add random bits below the last one and cut them off; a finite value stays finite."""
    size = np.int64(value) & 0x7FFFFFFF
    sign = (np.int64(value) >> 16) & 0x8000
    if size >= 0x7F800000:
        return np.uint16(sign | (size >> 16) | (0x40 if size > 0x7F800000 else 0))
    return np.uint16(sign | min((size + np.int64(noise)) >> 16, 0x7F7F))
