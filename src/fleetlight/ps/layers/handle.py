# SPDX-License-Identifier: Apache-2.0
"""`TableHandle`: connects a layer to the rows of its table."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from fleetlight.errors import PlanError
from fleetlight.kernels import Deduped
from fleetlight.ps.plan import TablePlan
from fleetlight.ps.update import Floats, Ids, TableGradients

#: shows and clicks of each distinct id
Counts = tuple[Floats, Floats] | None


class Asked(NamedTuple):
    """The ids that a forward looks up in one table; with `insert`, unknown ids get a row."""

    table: int
    ids: Ids
    insert: bool


class RowSource(Protocol):
    """Provides rows to a layer; a communicator."""

    @property
    def reached(self) -> Callable[[int, Ids], None] | None:
        """Called with the ids of a lookup, including padding."""

    def look_up(self, asked: Sequence[Asked]) -> Sequence[tuple[Deduped, Floats | Tensor]]:
        """Return the distinct ids of each table and their rows, in the same order."""


@dataclasses.dataclass(frozen=True)
class Visit:
    """The ids of one forward and their rows."""

    wanted: Deduped
    #: a tensor if a cache has them on the device of the layer
    found: Floats | Tensor

    @property
    def rows(self) -> Floats:
        """The rows in main memory."""
        found = self.found
        return found if isinstance(found, np.ndarray) else found.cpu().numpy()

    @property
    def inverse(self) -> NDArray[np.int32]:
        """The row of each id of the forward."""
        return self.wanted.inverse

    def part(self, summed: Floats, counts: Counts) -> TableGradients:
        """The gradient of the distinct rows."""
        shows, clicks = counts or (None, None)
        return TableGradients(self.wanted.ids, self.wanted.starts, summed, shows, clicks)


class TableHandle:
    """Belongs to the job, not to the layer: a copied layer uses the same table."""

    def __init__(
        self,
        number: int,
        plan: TablePlan,
        source: RowSource,
        when_pickled: Callable[[str], None] | None = None,
    ) -> None:
        self.number = number
        self.plan = plan
        self._source: RowSource | None = source
        #: called with the name of the table
        self._when_pickled = when_pickled

    @property
    def is_over(self) -> bool:
        """True after `fleet.reset()` has ended the job."""
        return self._source is None

    def close(self) -> None:
        """Release the job."""
        self._source = None

    def _rows(self) -> RowSource:
        if self._source is None:
            raise PlanError(
                f"the rows of table {self.plan.name} were in a job that fleet.reset() has ended; "
                "build the model again, and register it after fleet.init()"
            )
        return self._source

    def reached(self, ids: Ids) -> None:
        """Report the ids of a lookup, as they are in the caller's tensor."""
        on_reached = self._rows().reached
        if on_reached is not None:
            on_reached(self.number, ids)

    def visit(self, ids: Ids, insert: bool) -> Visit:
        """Read the rows of ids; with `insert`, insert rows for unknown ids."""
        return self.visit_all([(self, ids, insert)])[0]

    @staticmethod
    def visit_all(asked: Sequence[tuple[TableHandle, Ids, bool]]) -> list[Visit]:
        """`visit` for several tables of a job, with one request to each server."""
        source = asked[0][0]._rows()
        found = source.look_up([Asked(table.number, ids, insert) for table, ids, insert in asked])
        return [Visit(*one) for one in found]

    def __deepcopy__(self, memo: object) -> TableHandle:
        return self

    def __reduce__(self) -> Any:
        # a pickled layer is loaded outside the job
        if self._when_pickled is not None:
            self._when_pickled(self.plan.name)
        return LeftBehind, (self.plan.name,)


class LeftBehind(TableHandle):
    """The handle of a pickled layer: it has the name of the table, and no rows."""

    def __init__(self, table: str) -> None:
        self._table = table

    @property
    def is_over(self) -> bool:
        """False: the layer can join another job."""
        return False

    def close(self) -> None:
        """Do nothing: there is no job to release."""

    def _rows(self) -> RowSource:
        raise PlanError(self.refusal)

    @property
    def refusal(self) -> str:
        """The error text of a lookup."""
        return (
            f"the rows of table {self._table} stayed on the parameter servers when this model was "
            "pickled, as torch.save(model) does; build a new model and load values into it: in a "
            "job by fleet.load_persistables(dirname) or fleet.load_state_dict(model, state), "
            "elsewhere from the file of fleetlight export"
        )

    def __reduce__(self) -> Any:
        return LeftBehind, (self._table,)
