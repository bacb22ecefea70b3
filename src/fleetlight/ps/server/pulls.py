# SPDX-License-Identifier: Apache-2.0
"""Reads the rows of a pull, and logs the rows and counts that the pull creates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from numpy.typing import NDArray

from fleetlight.ps.changes import RowsSeen
from fleetlight.ps.messages import Pull, TablePull
from fleetlight.ps.server.write_ahead_log import WriteAheadLog
from fleetlight.ps.tables.server_state import ServerState
from fleetlight.ps.update import Floats, Ids
from fleetlight.ps.wire_forms import encoded

Array = NDArray[Any]


def pulled(
    state: ServerState, log: WriteAheadLog, message: Pull, ids: Sequence[Array]
) -> list[Array]:
    """Rows of each requested table, and dense values."""
    if not log.logs_values:
        return state.pull(message, ids)
    found: list[Array] = []
    for wanted, its in zip(message.tables, ids, strict=True):
        rows = _rows(state, log, wanted, its, message.step)
        found += encoded(rows, state.table(wanted.table).plan)
    return found + state.dense.values() if message.dense else found


def _rows(state: ServerState, log: WriteAheadLog, wanted: TablePull, ids: Ids, step: int) -> Floats:
    table = state.table(wanted.table)
    change = RowsSeen(wanted.table, step)
    if not wanted.insert:
        return table.pull(ids, False, step)
    if table.plan.entry is not None:
        # counts decide the admission of ids, so their order with pushes matters
        return log.apply(change, [ids], lambda: table.pull(ids, True, step))
    before = len(table)
    rows = table.pull(ids, True, step)
    if len(table) != before:
        # a row's initial value does not depend on the order; but if a snapshot lacks the row, its
        # record must come after the snapshot
        with log.lock:
            log.append(change, [ids])
    return rows
