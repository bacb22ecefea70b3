# SPDX-License-Identifier: Apache-2.0
"""`TableHandle`: how a layer reaches the rows of its table."""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from fleetlight.kernels import Deduped, dedup
from fleetlight.ps.plan import TablePlan
from fleetlight.ps.update import Floats, Ids


class Rows(Protocol):
    """Whoever has the rows: a communicator, seen from a layer."""

    def pull(self, table: int, wanted: Deduped, insert: bool) -> Floats:
        """The rows of distinct ids, in their order."""


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

    def __init__(self, number: int, plan: TablePlan, servers: int, source: Rows) -> None:
        self.number = number
        self.plan = plan
        self._servers = servers
        self._source = source

    def visit(self, ids: Ids, insert: bool) -> Visit:
        """Read the rows of ids; with `insert`, unknown ones get a row."""
        wanted = dedup(ids, self._servers)
        return Visit(wanted, self._source.pull(self.number, wanted, insert))

    def __deepcopy__(self, memo: object) -> TableHandle:
        return self

    def __reduce__(self) -> Any:
        # a pickled layer is read outside of the job
        return _no_handle, ()


def _no_handle() -> None:
    return None
