# SPDX-License-Identifier: Apache-2.0
"""`TwinTable`: RowTable as a dictionary of rows, slow and readable, the oracle of its tests."""

from __future__ import annotations

import numpy as np

from fleetlight.kernels import twins
from fleetlight.kernels.arrays import Doubles, Grid, Ids, Int64s, Matrix
from fleetlight.kernels.rows.first_values import Initializer
from fleetlight.kernels.rows.updates import rule_named
from fleetlight.kernels.rule import Rule


class TwinTable:
    """Has the methods of RowTable."""

    def __init__(
        self,
        dim: int,
        rule: Rule | str,
        seed: int = 0,
        initializer: Initializer | None = None,
        meta_width: int = 0,
    ) -> None:
        self.dim = dim
        self.rule = rule_named(rule) if isinstance(rule, str) else rule
        self.seed = seed
        self.initializer = initializer or Initializer()
        self.meta_width = meta_width
        self.state_width = self.rule.state_width(dim)
        self.width = dim + self.state_width + meta_width
        self.rows: Matrix = np.zeros((0, self.width), np.float32)
        self._number: dict[int, int] = {}
        self._freed: list[int] = []

    def __len__(self) -> int:
        return len(self._number)

    @property
    def freed(self) -> Int64s:
        """The numbers of rows that are not in use."""
        return np.array(self._freed, np.int64)

    @property
    def numbers(self) -> Int64s:
        """The numbers of all rows in use, ascending."""
        return np.array(sorted(self._number.values()), np.int64)

    def pull(self, ids: Ids, insert: bool = True) -> Matrix:
        """The weights of each id; `insert` gives unknown ids a row, else they read first values."""
        if insert:
            self.insert(ids)
        values = twins.first_values(ids, self.dim, self.seed, self.initializer)
        numbers = self.find(ids)
        values[numbers >= 0] = self.rows[numbers[numbers >= 0], : self.dim]
        return values

    def push(self, ids: Ids, grads: Grid, hyper: Doubles) -> None:
        """Change the row of each id once, by the sum of its gradients."""
        deduped = twins.dedup(ids, 1)
        sums = twins.sum_by(grads, deduped.inverse, len(deduped.ids))
        numbers = self.insert(deduped.ids)
        end = self.dim + self.state_width
        weights, state = self.rows[numbers, : self.dim], self.rows[numbers, self.dim : end]
        weights, state = twins.update(self.rule, weights, state, sums, hyper)
        self.rows[numbers, : self.dim], self.rows[numbers, self.dim : end] = weights, state

    def find(self, ids: Ids) -> Int64s:
        """The row number of each id, -1 where there is none."""
        return np.array([self._number.get(one, -1) for one in ids.tolist()], np.int64)

    def insert(self, ids: Ids) -> Int64s:
        """The row number of each id; unknown ids get a row with their first values."""
        for one in ids.tolist():
            if one not in self._number:
                self._number[one] = self._new_row(one)
        return self.find(ids)

    def ids_of(self, numbers: Ids) -> Ids:
        """The ids of rows in use."""
        known = {number: one for one, number in self._number.items()}
        return np.array([known[number] for number in numbers.tolist()], np.int64)

    def remove(self, numbers: Ids) -> int:
        """Free rows for new ids; return how many of them were in use."""
        known = {number: one for one, number in self._number.items()}
        gone = [number for number in dict.fromkeys(numbers.tolist()) if number in known]
        for number in gone:
            del self._number[known[number]]
        self._freed += gone
        return len(gone)

    def load(self, ids: Ids, full_rows: Grid) -> None:
        """Set whole rows: weights, state and metadata."""
        for number, row in zip(self.insert(ids), full_rows, strict=True):
            self.rows[number] = row

    def _new_row(self, one: int) -> int:
        row = np.zeros(self.width, np.float32)
        ids = np.array([one], np.int64)
        row[: self.dim] = twins.first_values(ids, self.dim, self.seed, self.initializer)[0]
        row[self.dim : self.dim + self.state_width] = self.rule.initial
        if not self._freed:
            self.rows = np.vstack([self.rows, row[None]])
            return len(self.rows) - 1
        number = self._freed.pop()
        self.rows[number] = row
        return number
