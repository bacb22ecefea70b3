# SPDX-License-Identifier: Apache-2.0
"""Removes rows of tables whose ids were not used for long, or have a low score."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from fleetlight.errors import ConfigError, PlanError, did_you_mean
from fleetlight.fleet.job import Job, ShrunkTable
from fleetlight.fleet.served.session import ServerSession
from fleetlight.fleet.served.tables.table_files import TableFiles
from fleetlight.ps import messages as m
from fleetlight.ps.plan import TablePlan


def shrink_tables(
    job: Job,
    session: ServerSession,
    unseen_days: int,
    score: float,
    decay: float,
    table: str | None,
) -> dict[str, ShrunkTable]:
    """Shrink tables, in a worker."""
    with job.at_rest():
        plan = session.bound.plan
        numbers = _chosen(plan.tables, table)
        files = TableFiles(session.client, job.group.deadline_s)
        replies, group = session.client.replies, job.group
        group.assemble("shrink")
        found: dict[str, ShrunkTable] = {}

        def ask() -> None:
            # the next incarnation of this worker repeats the call under the same number
            call = replies.made + 1
            for number in numbers:
                message = m.Shrink(number, unseen_days, score, decay, call)
                shrunk = files.ask_all(message, files.table_bytes()).values()
                removed, left = (
                    sum(getattr(s, key) for s in shrunk) for key in ShrunkTable._fields
                )
                found[plan.tables[number].name] = ShrunkTable(removed, left)

        def alone() -> Sequence[bytes]:
            ask()
            return [msgspec.json.encode(found)]

        if group.alone:
            # there is no barrier that would count as a call
            [result] = replies.once("shrink", alone)
        else:
            group.together(ask if group.index == 0 else None, "shrink")
            result = group.broadcast_bytes(msgspec.json.encode(found), "shrink")
    return msgspec.json.decode(result, type=dict[str, ShrunkTable])


def _chosen(tables: Sequence[TablePlan], name: str | None) -> list[int]:
    """The numbers of the tables to shrink: the named one, or all that count their ids."""
    names = [table.name for table in tables]
    if name is not None and name not in names:
        known = did_you_mean(name, names) if names else "this model has no tables"
        raise ConfigError(f"fleet.shrink: there is no table {name!r}; {known}")
    chosen = [n for n, t in enumerate(tables) if t.is_counted and name in (None, t.name)]
    leaders = {t.name: t.entry.table for t in tables if t.entry is not None and t.entry.table}
    if not chosen and name in leaders:
        raise PlanError(
            f"fleet.shrink: the rows of table {name!r} leave with those of {leaders[name]!r}; "
            f"shrink that one"
        )
    if not chosen:
        which = "no table has" if name is None else f"table {name!r} does not have"
        raise PlanError(
            f"fleet.shrink: {which} an entry or max_rows, which count how often ids are seen; "
            "write one of them in the layer, such as fleet.nn.SparseEmbedding(dim, "
            "entry=fleet.ShowClickEntry())"
        )
    return chosen
