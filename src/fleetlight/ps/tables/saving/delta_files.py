# SPDX-License-Identifier: Apache-2.0
"""The files of a delta : rows that replace those of the base, and ids without a row."""

from __future__ import annotations

from typing import TypeVar

import numpy as np

from fleetlight.kernels import BucketCount, RowTable, put_in_bucket_order
from fleetlight.ps.tables.table_file import (
    DELTA,
    REMOVED,
    Column,
    TableReader,
    TableWriter,
    no_pause,
)
from fleetlight.ps.update import Floats, Ids

_T = TypeVar("_T")


def part_of(removed: Ids | None) -> str:
    """The part that a snapshot of a table is; "": all rows."""
    return "" if removed is None else DELTA


def about_file(table: str, rule: str, part: str) -> dict[str, str]:
    """What the file of a table has beside rows."""
    about = {"table": table, "rule": rule}
    return {**about, "part": part} if part else about


def name_of(number: int, server: int, part: str, piece: str = "") -> str:
    """The name of the file of a table; those of a base and of a delta differ."""
    parts = (f"table{number:03d}", f"server{server:03d}", part, piece, "safetensors")
    return ".".join(one for one in parts if one)


def write_ids(write: TableWriter[_T], ids: Ids, table: str) -> _T:
    """Write ids that lost their row, in bucket order."""
    counted, ordered = BucketCount(), ids.copy()
    counted.add(ids)
    put_in_bucket_order(counted.starts, ordered, np.zeros(len(ids), np.int32))
    about = about_file(table, "", REMOVED)
    pieces = [(ordered, np.empty((len(ids), 0), np.float32))]
    return write([], len(ids), pieces, about, no_pause, counted.starts)


def take_rows(
    table: RowTable,
    reader: TableReader,
    buckets: range | None,
    columns: list[Column],
    blank: Floats,
    size: int,
) -> int:
    """Load a file, `size` rows at a time; return how many more rows the table must have."""
    first, stop = reader.span(buckets)
    count = 0 if reader.part == REMOVED else stop - first
    for ids, rows in reader.pieces(buckets, columns, blank, size):
        if reader.part:
            numbers = table.find(ids)
            known = numbers[numbers >= 0]
            count -= len(known)
        if reader.part == REMOVED:
            table.remove(known)
        else:
            table.load(ids, rows)
    return count
