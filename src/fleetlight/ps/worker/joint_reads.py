# SPDX-License-Identifier: Apache-2.0
"""Reads of several tables whose missing rows share one request to each server.

A read is a generator: it yields the distinct ids whose rows the worker does not have, receives
these rows, and returns all rows. A read that has all rows yields nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence

from fleetlight.kernels import Deduped
from fleetlight.ps.update import Floats
from fleetlight.ps.worker.reply_values import Wanted

#: yields missing ids, receives their rows, returns all rows
Read = Generator[Deduped, Floats, Floats]
#: pulls rows of several tables from the servers
Fetch = Callable[[Sequence[Wanted]], Sequence[Floats]]


def read_together(
    wanted: Sequence[Wanted], read: Callable[[Wanted], Read], fetch: Fetch
) -> list[Floats]:
    """The rows of each table, with one fetch for the rows that any of them misses."""
    reads = [read(one) for one in wanted]
    rows: dict[int, Floats] = {}
    missing: dict[int, Wanted] = {}
    try:
        for number, one in enumerate(wanted):
            try:
                missing[number] = Wanted(one.table, next(reads[number]), one.insert)
            except StopIteration as end:
                rows[number] = end.value
        arrived = fetch(list(missing.values())) if missing else ()
        for number, its in zip(missing, arrived, strict=True):
            rows[number] = _last(reads[number], its)
    finally:
        # a read may hold a lock until it ends
        for begun in reads:
            begun.close()
    return [rows[number] for number in range(len(wanted))]


def _last(read: Read, arrived: Floats) -> Floats:
    """The result of a read that receives its missing rows."""
    try:
        read.send(arrived)
    except StopIteration as end:
        rows: Floats = end.value
        return rows
    raise AssertionError("a read asks once for rows")
