# SPDX-License-Identifier: Apache-2.0
"""`TableHandle`: how a layer reaches the rows of its table."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from fleetlight.kernels import Deduped
from fleetlight.ps.plan import TablePlan
from fleetlight.ps.update import Floats, Ids


class Rows(Protocol):
    """Whoever has the rows: a communicator, seen from a layer."""

    #: told which ids a layer reads rows of, before padding is left out
    reached: Callable[[int, Ids], None] | None

    def look_up(self, table: int, ids: Ids, insert: bool) -> tuple[Deduped, Floats]:
        """The distinct ids and their rows, in the same order."""


@dataclasses.dataclass(frozen=True)
class Visit:
    """The ids of one forward, and their rows."""

    wanted: Deduped
    rows: Floats

    @property
    def inverse(self) -> NDArray[np.int32]:
        """Which row each id of the forward reads."""
        return self.wanted.inverse


class TableHandle:
    """Belongs to the job, not to the layer: a copied layer reads the same table."""

    def __init__(self, number: int, plan: TablePlan, source: Rows) -> None:
        self.number = number
        self.plan = plan
        self._source = source

    def reached(self, ids: Ids) -> None:
        """These ids have come to the table, as they are in the tensor of the caller."""
        if self._source.reached is not None:
            self._source.reached(self.number, ids)

    def visit(self, ids: Ids, insert: bool) -> Visit:
        """Read the rows of ids; with `insert`, unknown ones get a row."""
        return Visit(*self._source.look_up(self.number, ids, insert))

    def __deepcopy__(self, memo: object) -> TableHandle:
        return self

    def __reduce__(self) -> Any:
        # a pickled layer is read outside of the job
        return _no_handle, ()


def _no_handle() -> None:
    return None
