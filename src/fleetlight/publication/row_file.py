# SPDX-License-Identifier: Apache-2.0
"""Files of rows, in the Parquet format: the columns `id`, `row`, `removed`, and `scale` for int8.

`row` is a list of `dim` numbers: float32, float16, or int8 times `scale`. Where `removed` is true,
the table has no row for the id any more, and `row` is zeros.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fleetlight.errors import ConfigError, PublicationError
from fleetlight.kernels import from_int8, to_float16, to_int8
from fleetlight.publication.manifest import F16, F32, INT8

Ids = NDArray[np.int64]
Rows = NDArray[np.float32]
#: by form: the type of the numbers in a file
_TYPES = {F32: np.float32, F16: np.float16, INT8: np.int8}
#: rows of a row group, which a reader decodes at a time
GROUP_ROWS = 1 << 17
_INSTALL = 'pip install "fleetlight[data]"'


class Counts(NamedTuple):
    """How many rows a file has, and how many ids it removes."""

    rows: int
    removed: int


class Piece(NamedTuple):
    """Some rows of a file, decoded; those of `removed` ids are zeros."""

    ids: Ids
    rows: Rows
    removed: NDArray[np.bool_]


def arrow() -> Any:
    """The module `pyarrow`, an extra, imported when rows are first written or read."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise ConfigError(
            f"published rows are Parquet files, and pyarrow cannot be imported ({error}); install "
            f"it with: {_INSTALL}"
        ) from error
    return pyarrow


def write_rows(
    path: Path, dim: int, form: str, pieces: Iterable[tuple[Ids, Rows]], removed: Ids
) -> Counts:
    """Write rows, then the ids of `removed` that have none of them."""
    pa = arrow()
    schema, seen, count = _schema(pa, dim, form), [np.empty(0, np.int64)], 0
    with pa.parquet.ParquetWriter(
        path, schema, compression="none", use_dictionary=["removed"], write_statistics=False
    ) as writer:
        for ids, rows in _groups(pieces):
            writer.write_table(_table(pa, schema, form, ids, rows, removed=False), GROUP_ROWS)
            count += len(ids)
            if len(removed):
                seen.append(ids)
        gone: Ids = np.setdiff1d(removed, np.concatenate(seen))
        if len(gone):
            zeros = np.zeros((len(gone), dim), np.float32)
            writer.write_table(_table(pa, schema, form, gone, zeros, removed=True), GROUP_ROWS)
    return Counts(count, len(gone))


def read_rows(path: Path, dim: int, form: str) -> Iterator[Piece]:
    """The pieces of a file; raises if it does not fit."""
    pa = arrow()
    try:
        with pa.parquet.ParquetFile(path, memory_map=True) as file:
            if not file.schema_arrow.equals(_schema(pa, dim, form)):
                raise PublicationError(
                    f"{path} has the columns {_columns(file.schema_arrow)}, expected "
                    f"{_columns(_schema(pa, dim, form))}; let the job publish again"
                )
            for group in range(file.num_row_groups):
                yield _decoded(file.read_row_group(group, use_threads=False), dim, form)
    except (pa.ArrowException, OSError) as error:
        raise PublicationError(f"{path} cannot be read as Parquet: {error}") from error


def _columns(schema: Any) -> str:
    return ", ".join(f"{field.name}: {field.type}" for field in schema)


def _schema(pa: Any, dim: int, form: str) -> Any:
    number = pa.field("item", pa.from_numpy_dtype(_TYPES[form]), nullable=False)
    fields = [
        pa.field("id", pa.int64(), nullable=False),
        pa.field("row", pa.list_(number, dim), nullable=False),
        pa.field("removed", pa.bool_(), nullable=False),
    ]
    if form == INT8:
        fields.append(pa.field("scale", pa.float32(), nullable=False))
    return pa.schema(fields)


def _groups(pieces: Iterable[tuple[Ids, Rows]]) -> Iterator[tuple[Ids, Rows]]:
    """Larger pieces: a row group has a cost of its own."""
    some: list[tuple[Ids, Rows]] = []
    count = 0
    for ids, rows in pieces:
        # a piece is valid until the next is read
        some.append((ids.copy(), rows.copy()))
        count += len(ids)
        if count >= GROUP_ROWS:
            yield _joined(some)
            some, count = [], 0
    if count:
        yield _joined(some)


def _joined(some: list[tuple[Ids, Rows]]) -> tuple[Ids, Rows]:
    ids, rows = zip(*some, strict=True)
    return np.concatenate(ids), np.concatenate(rows)


def _table(pa: Any, schema: Any, form: str, ids: Ids, rows: Rows, *, removed: bool) -> Any:
    values: NDArray[Any] = rows
    scales = None
    if form == F16:
        values = to_float16(rows)
    elif form == INT8:
        values, scales = to_int8(rows)
    columns = [
        pa.array(ids),
        pa.FixedSizeListArray.from_arrays(
            pa.array(np.ascontiguousarray(values).reshape(-1)), type=schema.field("row").type
        ),
        pa.array(np.full(len(ids), removed)),
    ]
    if scales is not None:
        columns.append(pa.array(scales))
    return pa.Table.from_arrays(columns, schema=schema)


def _decoded(table: Any, dim: int, form: str) -> Piece:
    values = table["row"].combine_chunks().flatten().to_numpy().reshape(-1, dim)
    if form == INT8:
        rows = from_int8(np.ascontiguousarray(values), _numbers(table, "scale"))
    else:
        rows = values.astype(np.float32, copy=False)
    return Piece(_numbers(table, "id"), rows, _numbers(table, "removed"))


def _numbers(table: Any, column: str) -> NDArray[Any]:
    return np.ascontiguousarray(table[column].to_numpy())
