# SPDX-License-Identifier: Apache-2.0
"""Parquet, whose groups are row groups, and Arrow IPC, whose groups are record batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fleetlight.data.columns import arrow
from fleetlight.data.columns.files.group_file import Bounds, GroupFile, arrow_input, opening
from fleetlight.data.locations.files import FoundFile


class ParquetFile(GroupFile):
    """The row groups of a file, as its footer describes them."""

    @classmethod
    def at(cls, source: FoundFile) -> ParquetFile:
        """Read the footer."""
        with opening(source, "Parquet"), arrow_input(source) as file:
            opened = _opened(file)
            footer = opened.metadata
            rows = tuple(footer.row_group(n).num_rows for n in range(footer.num_row_groups))
            return cls(source, opened.schema_arrow, rows)

    @property
    def group_name(self) -> str:
        return "row group"

    def read(self, group: int, columns: Sequence[str]) -> Any:
        with self.reading(group), arrow_input(self.source) as file:
            return _opened(file).read_row_group(group, columns=list(columns), use_threads=False)

    def bounds(self, group: int, columns: Sequence[str]) -> Bounds:
        with self.reading(group), arrow_input(self.source) as file:
            footer = _opened(file).metadata
        found: Bounds = {}
        for place in range(footer.num_columns):
            column = footer.row_group(group).column(place)
            known = column.statistics
            if column.path_in_schema in columns and known is not None and known.has_min_max:
                has_missing = known.null_count is None or known.null_count > 0
                found[column.path_in_schema] = (known.min, known.max, has_missing)
        return found


class ArrowFile(GroupFile):
    """The record batches of a file."""

    @classmethod
    def at(cls, source: FoundFile) -> ArrowFile:
        """Read the footer, and the length of each batch, with as few bytes as that takes."""
        ipc = arrow("pyarrow.ipc")
        with opening(source, "an Arrow file"), arrow_input(source) as file:
            schema = ipc.open_file(file).schema
            options = ipc.IpcReadOptions(included_fields=_narrowest(schema), use_threads=False)
            opened = ipc.open_file(file, options=options)
            rows = tuple(opened.get_batch(n).num_rows for n in range(opened.num_record_batches))
            return cls(source, schema, rows)

    @property
    def group_name(self) -> str:
        return "record batch"

    def read(self, group: int, columns: Sequence[str]) -> Any:
        pa, ipc = arrow(), arrow("pyarrow.ipc")
        places = [self.schema.get_field_index(name) for name in columns]
        options = ipc.IpcReadOptions(included_fields=sorted(places), use_threads=False)
        with self.reading(group), arrow_input(self.source) as file:
            batch = ipc.open_file(file, options=options).get_batch(group)
            return pa.Table.from_batches([batch])


def _narrowest(schema: Any) -> list[int]:
    """The column with the fewest bytes, of those of fixed width if there are some."""
    is_primitive = arrow("pyarrow.types").is_primitive
    widths = {
        place: field.type.bit_width
        for place, field in enumerate(schema)
        if is_primitive(field.type)
    }
    return [min(widths, key=lambda place: widths[place])] if widths else [0][: len(schema)]


def _opened(file: Any) -> Any:
    return arrow("pyarrow.parquet").ParquetFile(file, pre_buffer=True)
