# SPDX-License-Identifier: Apache-2.0
"""`RowTable`: rows by id, created when an id is first used, and updated by a rule."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import ArrayLike

from fleetlight.errors import ConfigError
from fleetlight.kernels.arrays import (
    Doubles,
    Grid,
    Ids,
    Int32s,
    Int64s,
    Matrix,
    as_grid,
    as_ids,
    room,
)
from fleetlight.kernels.ids.dedup import collect
from fleetlight.kernels.ids.gathering import sum_by
from fleetlight.kernels.rows import probing, row_access
from fleetlight.kernels.rows.first_values import Initializer, as_int64
from fleetlight.kernels.rows.index import Index
from fleetlight.kernels.rows.slab import FREED, FRESH, LIVE, TOP, Slab
from fleetlight.kernels.rows.updates import rule_named, update_by
from fleetlight.kernels.rule import HYPER, Rule


class RowTable:
    """Rows of [weights | state | meta] by id.

    Not thread-safe: the caller holds a lock. Kernels release the GIL, so threads that use other
    tables run in parallel. Views of `rows` are valid until the table grows.
    """

    def __init__(
        self,
        dim: int,
        rule: Rule | str,
        seed: int = 0,
        initializer: Initializer | None = None,
        meta_width: int = 0,
        capacity_hint: int = 0,
    ) -> None:
        if dim < 1 or meta_width < 0:
            raise ConfigError(f"dim={dim}, meta_width={meta_width}: expected dim >= 1, meta >= 0")
        self.dim = dim
        self.rule = rule_named(rule) if isinstance(rule, str) else rule
        self.seed = seed
        self.initializer = initializer or Initializer()
        self.meta_width = meta_width
        self.state_width = self.rule.state_width(dim)
        #: the floats of a row that hold its weights
        self.weights_width = self._weights_width(dim)
        self.width = self.weights_width + self.state_width + meta_width
        self._slab = Slab(self.width)
        self._index = Index(capacity_hint)
        self._update = update_by(self.rule.name, self.rule.step)

    def __len__(self) -> int:
        return int(self._slab.counters[LIVE])

    @property
    def nbytes(self) -> int:
        """Bytes of memory in use."""
        return self._slab.nbytes + self._index.nbytes

    @property
    def growing(self) -> bool:
        """Whether calls still move entries to a larger index."""
        return len(self._index.old) > 0

    @property
    def rows(self) -> Matrix:
        """Rows by number, including those of removed ids."""
        return self._slab.rows

    @property
    def top(self) -> int:
        """The number of rows ever used: every row number is below it."""
        return int(self._slab.counters[TOP])

    @property
    def row_width(self) -> int:
        """The number of floats of a whole row as `stored` returns it."""
        return self.width

    @property
    def meta(self) -> Matrix:
        """The metadata of all rows, by number; the view is valid until the table grows."""
        return self.rows[:, self.width - self.meta_width :]

    @property
    def freed(self) -> Int32s:
        """The numbers of free rows; the view is valid until the next change."""
        return self._slab.freed[: self._slab.counters[FREED]]

    @property
    def numbers(self) -> Int32s:
        """The numbers of all rows in use, ascending."""
        used = np.ones(self.top, np.bool_)
        used[self.freed] = False
        return np.flatnonzero(used).astype(np.int32)

    def pull(self, ids: ArrayLike, out: Matrix | None = None, insert: bool = True) -> Matrix:
        """The weights of each id; `insert` gives unknown ids a row, else they read first values."""
        ids = as_ids(ids)
        out = room(out, (len(ids), self.dim))
        numbers = self._locate(ids, insert)
        self._read(numbers, out)
        if not insert and len(numbers) and numbers.min() < 0:
            self._read_unknown(numbers, ids, out)
        return out

    def push(
        self,
        ids: ArrayLike,
        grads: ArrayLike,
        hyper: Doubles,
        distinct: bool = False,
        changing: Callable[[Int64s, Ids], None] | None = None,
        step: int = 0,
    ) -> None:
        """Change the row of each id once, by the sum of its gradients.

        `changing` is called first, with the numbers and the ids of the rows. `step` seeds the
        rounding of a table that rounds.
        """
        ids = as_ids(ids)
        grads = as_grid(grads, self.dim, "gradients", rows=len(ids))
        _check(hyper)
        if not distinct:
            ids, grads = _coalesced(ids, grads)
        numbers = self._locate(ids, insert=True)
        if changing is not None:
            changing(numbers, ids)
        self._change(numbers, ids, grads, hyper, step)

    def learn(self, numbers: Int64s, grads: ArrayLike, hyper: Doubles) -> None:
        """Update rows by number; numbers must be distinct."""
        grads = as_grid(grads, self.dim, "gradients", rows=len(numbers))
        _check(hyper)
        self._apply(numbers, grads, hyper)

    def reading(self, ids: ArrayLike) -> Callable[[], None] | None:
        """A call that lets the disk begin with the rows of ids; None: they are in memory.

        It needs no lock, and rows may have moved before it.
        """
        return None

    def find(self, ids: ArrayLike) -> Int64s:
        """The row number of each id, -1 where there is none."""
        return self._locate(as_ids(ids), insert=False)

    def insert(self, ids: ArrayLike) -> Int64s:
        """The row number of each id; unknown ids get a row with their first values."""
        return self._locate(as_ids(ids), insert=True)

    def ids_of(self, numbers: ArrayLike) -> Ids:
        """The ids of rows in use."""
        numbers = as_ids(numbers)
        ids = np.empty(len(numbers), np.int64)
        index, slab = self._index, self._slab
        read = probing.ids_of(numbers, index.slots, index.old, slab.homes, self.top, ids)
        if read < len(numbers):
            raise ConfigError(
                f"row {numbers[read]} of {self.top} holds no id: it was removed or never used"
            )
        return ids

    def remove(self, numbers: ArrayLike) -> int:
        """Free rows for new ids; return how many of them were in use."""
        numbers = as_ids(numbers)
        index, slab = self._index, self._slab
        slab.make_room_to_free(len(numbers))
        return probing.forget(
            numbers, index.slots, index.old, slab.homes, slab.freed, slab.counters
        )

    def load(self, ids: ArrayLike, full_rows: ArrayLike) -> None:
        """Set whole rows: weights, state and metadata."""
        ids = as_ids(ids)
        values = self._packed(as_grid(full_rows, self.whole_width, "rows", rows=len(ids)))
        numbers = self._locate(ids, insert=True, begin=False)
        row_access.write(self._slab.flat, self.width, numbers, values)

    def set_weights(self, numbers: Int64s, weights: Grid) -> None:
        """Replace the weights of rows by number."""
        self._write_weights(numbers, weights)

    def stored(self, numbers: Int64s) -> tuple[Matrix, Int64s]:
        """A matrix with whole rows as they are stored, and the position of each number in it.

        Numbers may be -1 or of removed rows; what the matrix has there is not defined.
        """
        return self.rows, numbers

    def reading_order(self, top: int) -> Int64s | None:
        """The order of the row numbers below `top` that reads fastest; None: ascending."""
        return None

    @property
    def whole_width(self) -> int:
        """The number of floats of weights, state and metadata of a row."""
        return self.dim + self.state_width + self.meta_width

    def whole(self, rows: Matrix) -> Matrix:
        """The weights, state and metadata of stored rows."""
        return rows

    @staticmethod
    def _weights_width(dim: int) -> int:
        return dim

    def _packed(self, whole: Grid) -> Grid:
        """Inverse of `whole`."""
        return whole

    def _read(self, numbers: Int64s, out: Matrix) -> None:
        row_access.read(self._slab.flat, self.width, numbers, out)

    def _read_unknown(self, numbers: Int64s, ids: Ids, out: Matrix) -> None:
        row_access.read_unknown(numbers, ids, *self._first(), out)

    def _change(self, numbers: Int64s, ids: Ids, grads: Grid, hyper: Doubles, step: int) -> None:
        self._apply(numbers, grads, hyper)

    def _apply(self, numbers: Int64s, grads: Grid, hyper: Doubles) -> None:
        self._update(self._slab.flat, self.width, numbers, grads.reshape(-1), self.dim, hyper)

    def _write_weights(self, numbers: Int64s, weights: Grid) -> None:
        self._slab.rows[numbers, : self.dim] = weights

    def _begin(self, numbers: Int64s, ids: Ids, fresh: Int64s) -> None:
        """Initialise the rows at these positions of `numbers`."""
        first, initial = self._first(), self.rule.initial
        row_access.begin(
            self._slab.flat,
            self.width,
            numbers,
            ids,
            fresh,
            self.weights_width,
            *first,
            self.state_width,
            initial,
        )

    def _locate(self, ids: Ids, insert: bool, begin: bool = True) -> Int64s:
        """The rows of ids; `begin` initialises new rows, else the caller writes them whole."""
        index = self._index
        index.looked_for(len(ids))
        numbers, missing = np.empty(len(ids), np.int64), np.empty(len(ids), np.int64)
        missing = missing[: probing.find(ids, index.slots, numbers, missing)]
        while len(missing):
            if len(index.old):
                probing.find_in_old(ids, index.old, numbers, missing)
            if not insert:
                break
            missing = missing[self._insert(ids, numbers, missing, begin) :]
            if len(missing):
                self._grow()
        return numbers

    def _insert(self, ids: Ids, numbers: Int64s, missing: Int64s, begin: bool) -> int:
        """Give rows to missing ids while there is room; return how many ids were handled."""
        index, slab = self._index, self._slab
        fresh = np.empty(len(missing), np.int64)
        done = probing.insert(
            ids,
            numbers,
            missing,
            index.slots,
            slab.homes,
            slab.freed,
            slab.counters,
            index.limit,
            slab.capacity,
            fresh,
        )
        fresh = fresh[: slab.counters[FRESH]]
        index.inserted(len(fresh), len(self))
        if begin:
            self._begin(numbers, ids, fresh)
        return done

    def _grow(self) -> None:
        if len(self) >= self._index.limit:
            self._index.grow()
        else:
            self._slab.grow()

    def _first(self) -> tuple[int, bool, float, float]:
        """The arguments of kernels for first values."""
        how = self.initializer
        return as_int64(self.seed), how.is_normal, how.offset, how.step


def _coalesced(ids: Ids, grads: Grid) -> tuple[Ids, Grid]:
    unique, inverse = collect(ids)
    if len(unique) == len(ids):
        return ids, grads
    return unique, sum_by(grads, inverse, len(unique))


def _check(hyper: Doubles) -> None:
    if len(hyper) != HYPER:
        raise ConfigError(
            f"{len(hyper)} hyper-parameters, expected {HYPER}: pass the result of rule.hyper()"
        )
