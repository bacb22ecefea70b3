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
from fleetlight.ps.tables.table import Table
from fleetlight.ps.update import Ids
from fleetlight.ps.wire_forms import Output, no_output

Array = NDArray[Any]


def pulled(
    state: ServerState,
    log: WriteAheadLog,
    message: Pull,
    ids: Sequence[Array],
    output: Output = no_output,
) -> list[Array]:
    """Rows of each requested table, and dense values; nothing of rows that are needed `soon`."""
    if message.soon:
        for wanted, its in zip(message.tables, ids, strict=True):
            state.table(wanted.table).expect(its)
        return []
    if not log.logs_values:
        return state.pull(message, ids, output)
    found: list[Array] = []
    for wanted, its in zip(message.tables, ids, strict=True):
        found += _rows(state.table(wanted.table), log, wanted, its, message.step, output)
    return found + state.dense.values(output) if message.dense else found


def _rows(
    table: Table, log: WriteAheadLog, wanted: TablePull, ids: Ids, step: int, output: Output
) -> list[Array]:
    change = RowsSeen(wanted.table, step)
    if not wanted.insert:
        return table.encoded(ids, False, step, output)
    if table.counts_pulls:
        # counts decide the admission of ids, so their order with pushes matters
        return log.apply(change, [ids], lambda: table.encoded(ids, True, step, output))
    before = len(table)
    rows = table.encoded(ids, True, step, output)
    if len(table) != before:
        # a row's initial value does not depend on the order; but if a snapshot lacks the row, its
        # record must come after the snapshot
        with log.lock:
            log.append(change, [ids])
    return rows
