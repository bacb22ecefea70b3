# SPDX-License-Identifier: Apache-2.0
"""`Rows` stands for `ServerState`: a row counts in one column how often each update was applied.

So a row shows which updates were lost, doubled, or never sent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleetlight.ps.gradients import Gradients, TablePart
from fleetlight.ps.tables.dense_state import DenseState
from fleetlight.ps.wire_forms import Output, no_output

Array = NDArray[Any]
#: called with the columns of each step
Witness = Callable[[set[int]], None]


class Dense:
    """There is no dense parameter."""

    def values(self, output: Output) -> list[Array]:
        """None."""
        return []

    def state(self) -> DenseState:
        """None."""
        return DenseState([], [], [], [])


class Rows:
    """One table, which is all that a simulated server has."""

    dense = Dense()
    has_values = False

    def __init__(self, plan: Any, witness: Witness) -> None:
        self.plan = plan
        self._witness = witness
        self.columns = plan.tables[0].dim
        self.rows: dict[int, Array] = {}
        self.tables = [_Table(self)]

    def table(self, number: int) -> _Table:
        """The only table."""
        return self.tables[number]

    def blocks(self, optimizer: int | None = None) -> list[Any]:
        """None."""
        return []

    def gradients(self, message: Any, arrays: Sequence[Array], who: str) -> Gradients:
        """Take a push apart."""
        return self.unpacked(message, arrays[: len(arrays) - len(message.ahead)], who)

    def unpacked(self, message: Any, arrays: Sequence[Array], who: str) -> Gradients:
        """Take gradients apart."""
        pairs = zip(message.tables, arrays[::2], arrays[1::2], strict=True)
        return Gradients({part.table: TablePart(ids, rows) for part, ids, rows in pairs}, None, [])

    def differences(self, message: Any, arrays: Sequence[Array], who: str) -> Gradients:
        """Take an exchange apart."""
        pairs = zip(message.tables, arrays[::2], arrays[1::2], strict=True)
        return Gradients({number: TablePart(ids, rows) for number, ids, rows in pairs}, None, [])

    def step(self, optimizer: int, options: Any, step: int, gradients: Gradients) -> None:
        """Add."""
        for part in gradients.tables.values():
            self._witness(set(np.flatnonzero(part.rows.any(axis=0)).tolist()))
            for one, row in zip(part.ids.tolist(), part.rows, strict=True):
                self.rows[one] = self.rows.get(one, 0) + row

    def summed(self, gradients: Gradients) -> tuple[Gradients, float]:
        """As they are."""
        return gradients, 1.0

    def pull(self, message: Any, ids: Sequence[Array], output: Output) -> list[Array]:
        """The rows, which are zeros where nothing was pushed."""
        return [self.read(its, output) for its in ids]

    def pulled_ids(self, message: Any, arrays: Sequence[Array], who: str) -> list[Array]:
        """Take the request for rows apart."""
        return list(arrays)

    def read(self, ids: Array, output: Output = no_output) -> Array:
        """Rows of these ids."""
        found = output((len(ids), self.columns), "float32")
        if found is None:
            found = np.empty((len(ids), self.columns), np.float32)
        found[:] = 0
        for place, one in enumerate(ids.tolist()):
            if one in self.rows:
                found[place] = self.rows[one]
        return found

    def ahead_ids(self, message: Any, arrays: Sequence[Array], who: str) -> list[Array]:
        """The last arrays of a push or a release."""
        return list(arrays[len(arrays) - len(message.ahead) :])

    def exchange(
        self, differences: Gradients, wants: bool, step: int, output: Output = no_output
    ) -> list[Array]:
        """Add, and read."""
        self.step(0, None, step, differences)
        return self.reread(differences, step, output) if wants else []

    def reread(self, differences: Gradients, step: int, output: Output) -> list[Array]:
        """Read."""
        return [self.read(part.ids, output) for part in differences.tables.values()]

    def cut(self, *, ordered: bool = True) -> dict[int, Array]:
        """As it is now."""
        return dict(self.rows)

    def save(self, cut: dict[int, Array], folder: Any, between: Any = None) -> list[Any]:
        """Write it; the process may die in it."""
        folder.disk.world.moment()
        folder.disk.rows[folder.first] = cut
        folder.disk.world.moment()
        return []

    def drop_cuts(self) -> None:
        """Drop the cut."""

    def check(self, message: Any, folder: Any, *, whole: bool = False) -> None:
        """Do nothing: the checkpoint exists."""

    def load(self, message: Any, folder: Any, *, whole: bool = False) -> None:
        """The saved rows."""
        self.rows = dict(folder.disk.rows[folder.first])

    def shrunk(self) -> list[Any]:
        """No day ends."""
        return []

    def remember_shrunk(self, shrunk: Any) -> None:
        """Nor has one ended."""

    def restore(self, state: DenseState, has_values: bool = True) -> None:
        """There is nothing dense."""


class _Table:
    """The table as the server reads it."""

    nbytes = 0
    counts_pulls = False

    def __init__(self, rows: Rows) -> None:
        self._rows, self.plan = rows, rows.plan.tables[0]

    def __len__(self) -> int:
        return len(self._rows.rows)

    def pull(self, ids: Array, insert: bool, step: int) -> Array:
        """Rows; inserted ones are zeros, as absent ones are."""
        return self.encoded(ids, insert, step, no_output)[0]

    def encoded(self, ids: Array, insert: bool, step: int, output: Output) -> list[Array]:
        """Rows, as in a reply."""
        if insert:
            for one in ids.tolist():
                self._rows.rows.setdefault(one, np.zeros(self._rows.columns, np.float32))
        return [self._rows.read(ids, output)]
