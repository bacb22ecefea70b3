# SPDX-License-Identifier: Apache-2.0
"""`Unpacking`: takes the arrays of a message in order and checks them against the plan."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleetlight.errors import PlanError, ProtocolError
from fleetlight.ps.dtypes import numpy_dtype
from fleetlight.ps.placement import Block
from fleetlight.ps.plan import FP32, TablePlan
from fleetlight.ps.update import Floats, Ids
from fleetlight.ps.wire_forms import FORMS

Array = NDArray[Any]


class Unpacking:
    """The arrays of one message, in order; with `narrow`, rows are in the form of their table."""

    def __init__(self, arrays: Sequence[Array], operation: str, *, narrow: bool = False) -> None:
        self._arrays = list(arrays)
        self._narrow = narrow
        self._taken = 0
        #: `push of worker 1`, for error texts
        self._operation = operation

    def ids(self, table: TablePlan) -> Ids:
        """Take the ids of a table, as a copy.

        A peer that shares memory could change them while an index inserts them.
        """
        array = self._next(f"ids of table {table.name!r}")
        if array.dtype != np.int64 or array.ndim != 1:
            raise self._unfit(f"ids of table {table.name!r}", array, "int64[n]")
        own: Ids = array.copy()
        return own

    def rows(self, table: TablePlan, count: int) -> Floats:
        """Take the rows, gradients or differences of `count` ids of a table."""
        what, arrays = f"rows of table {table.name!r}", []
        form = FORMS[table.wire if self._narrow else FP32]
        for dtype, shape in form.shapes(count, table.dim):
            array = self._next(what)
            if array.dtype != dtype or array.shape != shape:
                raise self._unfit(what, array, f"{dtype}[{', '.join(map(str, shape))}]")
            arrays.append(array)
        return form.decode(arrays)

    def counts(self, table: TablePlan, count: int) -> Floats:
        """Take one number for each of `count` ids."""
        array = self._next(f"counts of table {table.name!r}")
        if array.dtype != np.float32 or array.shape != (count,):
            raise self._unfit(f"counts of table {table.name!r}", array, f"float32[{count}]")
        return array

    def blocks(self, blocks: Sequence[Block]) -> list[Array]:
        """Take the flat values of dense blocks."""
        found = []
        for block in blocks:
            what = f"dense values of optimizer {block.optimizer}"
            array = self._next(what)
            if array.dtype != numpy_dtype(block.dtype) or array.shape != (block.size,):
                raise self._unfit(what, array, f"{block.dtype}[{block.size}]")
            found.append(array)
        return found

    def rest(self) -> list[Array]:
        """Take all remaining arrays."""
        rest, self._taken = self._arrays[self._taken :], len(self._arrays)
        return rest

    def end(self) -> None:
        """Raise if arrays remain."""
        if self._taken != len(self._arrays):
            raise ProtocolError(
                f"{self._operation} came with {len(self._arrays)} arrays, expected {self._taken}"
            )

    def _next(self, what: str) -> Array:
        if self._taken == len(self._arrays):
            raise ProtocolError(
                f"{self._operation} came with {len(self._arrays)} arrays, the {what} are missing"
            )
        self._taken += 1
        return self._arrays[self._taken - 1]

    def _unfit(self, what: str, array: Array, expected: str) -> PlanError:
        shape = ", ".join(map(str, array.shape))
        return PlanError(
            f"{self._operation}: the {what} are {array.dtype}[{shape}], expected {expected}; "
            "workers and servers must run the same script"
        )
