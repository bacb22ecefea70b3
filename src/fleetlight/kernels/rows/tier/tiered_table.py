# SPDX-License-Identifier: Apache-2.0
"""`TieredRowTable`: a `RowTable` that has only its frequent rows in memory, the others in a file.

Ids, row numbers and metadata are in memory, so lookups and row numbers are those of a `RowTable`,
and results are equal to the bit. Each call first brings its rows into slots: it evicts other rows,
and reads what is missing in one batch. Then the kernels of `RowTable` work on slots instead of row
numbers.

A call that fails, such as by a write to a full disk, leaves all rows as they were if they fit into
half of the slots.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Protocol

import numpy as np
from numpy.typing import ArrayLike

from fleetlight.errors import ConfigError, RowFileError
from fleetlight.kernels.arrays import Doubles, Grid, Ids, Int32s, Int64s, Matrix, as_grid, as_ids
from fleetlight.kernels.rows import row_access
from fleetlight.kernels.rows.first_values import Initializer
from fleetlight.kernels.rows.narrow_table import NarrowRowTable
from fleetlight.kernels.rows.table import RowTable
from fleetlight.kernels.rows.tier import residency
from fleetlight.kernels.rows.tier.slots import Slots
from fleetlight.kernels.rule import Rule

#: fewer slots could not hold the rows of a call beside others
MIN_SLOTS = 16
#: rows that leave memory together, if there are so many
_EVICTED = 1024
#: bytes of a slot beside its row
_SLOT_BYTES = 13


class RowStore(Protocol):
    """Records of rows outside memory, by position. A record is [number | weights | state]."""

    def append(self, records: Matrix) -> Int32s:
        """Write records; return their positions. On a failure nothing has changed."""

    def read(self, positions: Ids) -> Matrix:
        """Read records, in the given order."""

    def expect(self, positions: Ids) -> None:
        """Begin to read records that are needed soon; any thread may call it."""

    def free(self, positions: Ids) -> None:
        """Drop records, at distinct positions."""

    def sparse_positions(self) -> Int64s | None:
        """Positions whose live records should move, so that their space is used again."""


class TieredRowTable(RowTable):
    """See the module. Not thread-safe, like `RowTable`."""

    def __init__(
        self,
        dim: int,
        rule: Rule | str,
        seed: int = 0,
        initializer: Initializer | None = None,
        meta_width: int = 0,
        capacity_hint: int = 0,
        *,
        slots: int,
        store: RowStore,
    ) -> None:
        """`slots`: how many rows are in memory at most."""
        super().__init__(dim, rule, seed, initializer, 0, capacity_hint)
        if slots < MIN_SLOTS:
            raise ConfigError(f"got {slots} rows in memory, expected at least {MIN_SLOTS}")
        self.meta_width = meta_width
        self._slots = Slots(self.width, slots, meta_width)
        self._slab = self._slots
        self._store = store
        self._hand: Int64s = np.zeros(1, np.int64)
        #: the rows of one call to a kernel; as many others stay in memory
        self._most = slots // 2

    @classmethod
    def stored_width(cls, dim: int, rule: Rule) -> int:
        """The floats of a row that can leave memory."""
        return cls._weights_width(dim) + rule.state_width(dim)

    @staticmethod
    def slots_in(memory: int, width: int) -> int:
        """The number of slots for rows of `width` floats in so many bytes."""
        return max(MIN_SLOTS, memory // (4 * width + _SLOT_BYTES))

    @property
    def row_width(self) -> int:
        """See `RowTable`."""
        return self.width + self.meta_width

    @property
    def rows(self) -> Matrix:
        """A copy of all rows, by number."""
        return self.stored(np.arange(self.top))[0]

    @property
    def meta(self) -> Matrix:
        """See `RowTable`."""
        return self._slots.meta[: self.top]

    def stored(self, numbers: Int64s) -> tuple[Matrix, Int64s]:
        """See `RowTable`; rows that are not in memory stay out of it."""
        out = np.zeros((len(numbers), self.row_width), np.float32)
        missing = np.empty(len(numbers), np.int64)
        slots, flat = self._slots, out.reshape(-1)
        count = residency.gather(
            numbers, slots.where, slots.flat, self.width, flat, self.row_width, missing
        )
        if count:
            missing = missing[:count]
            self._read_file(numbers[missing], missing, out)
        known = (numbers >= 0) & (numbers < self.top)
        out[known, self.width :] = slots.meta[numbers[known]]
        return out, np.arange(len(numbers))

    def reading(self, ids: ArrayLike) -> Callable[[], None] | None:
        """See `RowTable`."""
        numbers = self.find(ids)
        where = self._slots.where[numbers[numbers >= 0]]
        positions = -where[where < 0].astype(np.int64) - 1
        return functools.partial(self._store.expect, positions) if len(positions) else None

    def reading_order(self, top: int) -> Int64s | None:
        """Rows in memory, then those in the file in its order; needs no lock."""
        where = self._slots.where[:top].copy()
        return np.argsort(-where).astype(np.int64)

    def set_weights(self, numbers: Int64s, weights: Grid) -> None:
        """See `RowTable`."""
        for part in self._parts(len(numbers)):
            slots = self._held(numbers[part])
            self._own(slots)
            self._write_weights(slots, weights[part])

    def learn(self, numbers: Int64s, grads: ArrayLike, hyper: Doubles) -> None:
        """See `RowTable`."""
        grads = as_grid(grads, self.dim, "gradients", rows=len(numbers))
        self._change(numbers, self.ids_of(numbers), grads, hyper, 0)

    def remove(self, numbers: ArrayLike) -> int:
        """See `RowTable`."""
        some = np.unique(as_ids(numbers))
        some = some[(some >= 0) & (some < self.top)]
        where = self._slots.where[some]
        held = where[where > 0].astype(np.int64) - 1
        self._own(held)
        self._slots.give_back(held)
        if (where < 0).any():
            self._store.free(-where[where < 0].astype(np.int64) - 1)
        self._slots.where[some] = 0
        return super().remove(numbers)

    def load(self, ids: ArrayLike, full_rows: ArrayLike) -> None:
        """See `RowTable`."""
        ids = as_ids(ids)
        whole = as_grid(full_rows, self.whole_width, "rows", rows=len(ids))
        for part in self._parts(len(ids)):
            self._make_room(part.stop - part.start)
            numbers = self._locate(ids[part], insert=True, begin=False)
            slots = self._held(numbers, read=False)
            values = self._packed(whole[part])
            kept = np.ascontiguousarray(values[:, : self.width])
            row_access.write(self._slab.flat, self.width, slots, kept)
            self._slots.meta[numbers] = values[:, self.width :]

    def _insert(self, ids: Ids, numbers: Int64s, missing: Int64s, begin: bool) -> int:
        done = 0
        while done < len(missing):
            part = missing[done : done + self._most]
            # before the index changes, because a full disk may prevent it
            self._make_room(len(part))
            now = super()._insert(ids, numbers, part, begin)
            done += now
            if now < len(part):
                break
        return done

    def _begin(self, numbers: Int64s, ids: Ids, fresh: Int64s) -> None:
        self._slots.meta[numbers[fresh]] = 0
        slots = self._held(numbers[fresh], read=False)
        super()._begin(slots, ids[fresh], np.arange(len(fresh)))

    def _read(self, numbers: Int64s, out: Matrix) -> None:
        for part in self._parts(len(numbers)):
            super()._read(self._held(numbers[part]), out[part])

    def _change(self, numbers: Int64s, ids: Ids, grads: Grid, hyper: Doubles, step: int) -> None:
        for part in self._parts(len(numbers)):
            slots = self._held(numbers[part])
            self._own(slots)
            super()._change(slots, ids[part], grads[part], hyper, step)

    def _parts(self, count: int) -> Iterator[slice]:
        """Ranges of a call, each with few enough rows to be in memory at once."""
        return (slice(a, min(a + self._most, count)) for a in range(0, count, self._most))

    def _held(self, numbers: Int64s, read: bool = True) -> Int64s:
        """The slots of rows, valid until the next call; `read` fills those that were not held.

        Without `read` the caller writes these rows whole.
        """
        slots, missing = np.empty(len(numbers), np.int64), np.empty(len(numbers), np.int64)
        where, uses = self._slots.where, self._slots.uses
        missing = missing[: residency.find_slots(numbers, where, uses, slots, missing)]
        try:
            if len(missing):
                self._fill(np.unique(numbers[missing]), read)
        finally:
            residency.unpin(slots, uses)
        if not read:
            self._own(slots[slots >= 0])
        slots[missing] = where[numbers[missing]] - 1
        return slots

    def _fill(self, numbers: Int64s, read: bool) -> None:
        """Give slots to distinct rows that have none."""
        slots = self._slots
        self._make_room(len(numbers))
        # a compaction may have moved them
        copies = np.negative(slots.where[numbers])
        taken = slots.take(len(numbers))
        try:
            if read:
                self._read_file(numbers, taken, slots.rows)
        except BaseException:
            slots.give_back(taken)
            raise
        if not read:
            self._store.free(copies[copies > 0].astype(np.int64) - 1)
            copies[:] = 0
        slots.owners[taken], slots.copies[taken], slots.uses[taken] = numbers, copies, 0
        slots.where[numbers] = taken + 1

    def _read_file(self, numbers: Int64s, places: Int64s, out: Matrix) -> None:
        """Copy rows from the file to places in `out`."""
        positions = -self._slots.where[numbers].astype(np.int64) - 1
        records = self._store.read(positions)
        flat, to = records.reshape(-1), out.reshape(-1)
        bits, stride = flat.view(np.int32), out.shape[1]
        wrong = residency.unpack(flat, bits, self.width, numbers, places, to, stride)
        if wrong >= 0:
            raise RowFileError(
                f"the file of a table has row {records.view(np.int32)[wrong, 0]} at position "
                f"{positions[wrong]}, expected row {numbers[wrong]}: another program has changed "
                "it, or the disk is damaged; restart the server from its last checkpoint"
            )

    def _own(self, slots: Int64s) -> None:
        """Forget equal rows in the file, because those in memory will change."""
        copies = self._slots.copies[slots]
        self._slots.copies[slots] = 0
        if copies.any():
            self._store.free(np.unique(copies[copies > 0]).astype(np.int64) - 1)

    def _make_room(self, count: int) -> None:
        """Make sure that `count` slots are free."""
        slots = self._slots
        lacking = count - slots.unused
        if lacking <= 0:
            return
        chosen = np.empty(max(lacking, min(_EVICTED, len(slots) // 4)), np.int64)
        chosen = chosen[
            : residency.choose(len(chosen), slots.owners, slots.uses, self._hand, chosen)
        ]
        try:
            changed = chosen[slots.copies[chosen] == 0]
            if len(changed):
                slots.copies[changed] = self._store.append(self._records(changed)) + 1
        except BaseException:
            residency.unpin(chosen, slots.uses)
            raise
        slots.where[slots.owners[chosen]] = -slots.copies[chosen]
        slots.give_back(chosen)
        self._compact()

    def _records(self, slots: Int64s) -> Matrix:
        records = np.empty((len(slots), self.width + 1), np.float32)
        flat = records.reshape(-1)
        owners, slab = self._slots.owners, self._slots.flat
        residency.pack(slots, slab, self.width, owners, flat, flat.view(np.int32))
        return records

    def _compact(self) -> None:
        """Move records together while the file has much unused space."""
        while (positions := self._store.sparse_positions()) is not None:
            records = self._store.read(positions)
            numbers = records.view(np.int32)[:, 0].astype(np.int64)
            slots = self._slots
            numbers[(numbers < 0) | (numbers >= self.top)] = 0
            place = slots.where[numbers].astype(np.int64)
            # a row in memory stays there, without its copy
            held = place - 1
            held[place <= 0] = 0
            copied = (place > 0) & (slots.copies[held] == positions + 1)
            cold = place == -(positions + 1)
            if cold.any():
                moved = self._store.append(np.ascontiguousarray(records[cold]))
                slots.where[numbers[cold]] = -(moved + 1)
            slots.copies[held[copied]] = 0
            self._store.free(positions[cold | copied])


class TieredNarrowRowTable(TieredRowTable, NarrowRowTable):
    """A `TieredRowTable` with weights in bfloat16."""
