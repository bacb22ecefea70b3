# SPDX-License-Identifier: Apache-2.0
"""`fleet.shrink`: tables forget ids that nobody has seen for long, or that are worth little."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from fleetlight.errors import ConfigError, PlanError, did_you_mean
from fleetlight.fleet.context import Context, current
from fleetlight.fleet.served.tables.table_files import TableFiles
from fleetlight.fleet.training.registered import refuse_in_server
from fleetlight.ps import messages as m
from fleetlight.ps.plan import TablePlan


class Shrunk(NamedTuple):
    """How many rows a table has forgotten, and how many are left."""

    removed: int
    left: int


def shrink(
    unseen_days: int = 0, score: float = 0.0, decay: float = 1.0, table: str | None = None
) -> dict[str, Shrunk]:
    """End a day: forget rows of the tables that have an entry; every worker calls it.

    A row goes that was not used in training for more than `unseen_days` calls of this function (0:
    however long), or whose 0.1 * (shows - clicks) + clicks, after both were multiplied by `decay`,
    is below `score`. Answers what became of each table.
    """
    context = current()
    refuse_in_server(context, "shrink")
    return _shrink(context, unseen_days, score, decay, table)


def _shrink(
    context: Context,
    unseen_days: int = 0,
    score: float = 0.0,
    decay: float = 1.0,
    table: str | None = None,
) -> dict[str, Shrunk]:
    _check(unseen_days, score, decay)
    if context.session is None:
        raise PlanError(
            "fleet.shrink: this job has no parameter servers, so it has no tables; start it "
            "with fleet.init()"
        )
    with context.at_rest():
        plan = context.session.drawn.plan
        numbers = _chosen(plan.tables, table)
        files = TableFiles(context.session.client, context.group.deadline_s)
        answers, group = context.session.client.answers, context.group
        group.assemble("shrink")
        found: dict[str, Shrunk] = {}

        def tell() -> None:
            # another life of this worker, which has made as many calls by now, says the same
            call = answers.made + 1
            for number in numbers:
                message = m.Shrink(number, unseen_days, score, decay, call)
                shrunk = files.everywhere(message, files.table_bytes()).values()
                removed, left = (sum(getattr(s, key) for s in shrunk) for key in Shrunk._fields)
                found[plan.tables[number].name] = Shrunk(removed, left)

        def alone() -> Sequence[bytes]:
            tell()
            return [msgspec.json.encode(found)]

        if group.alone:
            # nobody is met, which would count as a call
            [told] = answers.once("shrink", alone)
        else:
            group.together(tell if group.index == 0 else None, "shrink")
            told = group.broadcast_bytes(msgspec.json.encode(found), "shrink")
    return msgspec.json.decode(told, type=dict[str, Shrunk])


def _chosen(tables: Sequence[TablePlan], name: str | None) -> list[int]:
    """The numbers of the tables to shrink: the named one, or all that count something."""
    names = [table.name for table in tables]
    if name is not None and name not in names:
        known = did_you_mean(name, names) if names else "this model has no tables"
        raise ConfigError(f"fleet.shrink: there is no table {name!r}; {known}")
    chosen = [n for n, t in enumerate(tables) if t.entry is not None and name in (None, t.name)]
    if not chosen:
        which = "no table has" if name is None else f"table {name!r} does not have"
        raise PlanError(
            f"fleet.shrink: {which} an entry, which counts how often ids are seen; write it in the "
            "layer, such as fleet.nn.SparseEmbedding(dim, entry=fleet.ShowClickEntry())"
        )
    return chosen


def _check(unseen_days: object, score: object, decay: object) -> None:
    if not isinstance(unseen_days, int) or isinstance(unseen_days, bool) or unseen_days < 0:
        raise ConfigError(
            f"fleet.shrink: got unseen_days={unseen_days!r}, expected a number of calls from 0 on"
        )
    if not isinstance(score, (int, float)) or not math.isfinite(score):
        raise ConfigError(f"fleet.shrink: got score={score!r}, expected a number")
    if not isinstance(decay, (int, float)) or not 0 < decay <= 1:
        raise ConfigError(f"fleet.shrink: got decay={decay!r}, expected 0 < decay <= 1")
