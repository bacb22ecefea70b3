# SPDX-License-Identifier: Apache-2.0
"""CSV, TSV and the like: a group is a stretch of lines."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

from fleetlight.data.columns import arrow
from fleetlight.data.columns.files.group_file import (
    GroupFile,
    arrow_input,
    first_line,
    opening,
)
from fleetlight.data.columns.layout import check_known
from fleetlight.data.locations.files import FoundFile, check_plain
from fleetlight.errors import DataError

#: bytes of a group, about
GROUP_BYTES = 8 << 20
#: bytes from which the types of columns are guessed
_SAMPLE = 1 << 20
#: Arrow's error for a value that is not of the type of its column
_MISFIT = re.compile(r"In CSV column #(\d+): .* invalid value '(.*)'")


@dataclasses.dataclass(frozen=True)
class TextFormat:
    """How the lines of text files are to be read."""

    delimiter: str = ","
    #: names of columns; None: the first line has them
    names: tuple[str, ...] | None = None
    #: texts that stand for a missing value
    missing: tuple[str, ...] = ("",)
    group_bytes: int = GROUP_BYTES
    #: Arrow types of columns, where the first lines mislead
    types: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class TextFile(GroupFile):
    """Lines, in groups of about the same size."""

    text_format: TextFormat
    #: bytes at which each group begins, and where the last one ends
    starts: tuple[int, ...] = ()

    @classmethod
    def at(cls, source: FoundFile, text_format: TextFormat, schema: Any = None) -> TextFile:
        """Count the lines; `schema`: types of another file of the data set."""
        with opening(source, "text"), arrow_input(source) as file:
            check_plain(_at(file, 0, min(source.size, 4)), source.name)
            names, first = _header(file, source, text_format)
            for name in text_format.types:
                check_known(name, names, f"{source.name}, types")
            starts, rows = _stretches(file, first, source.size, text_format.group_bytes)
            if schema is None:
                schema = _guess(file, first, names, text_format, source)
            elif tuple(schema.names) != names:
                raise DataError(
                    f"{source.name}: got the columns {', '.join(names)}, expected "
                    f"{', '.join(schema.names)} as in the first file"
                )
        return cls(source, schema, rows, text_format, starts)

    @property
    def group_name(self) -> str:
        return "group"

    def place(self, group: int) -> str:
        first = 1 + sum(self.rows[:group]) + (self.text_format.names is None)
        return f"{self.name}, lines {first} to {first + self.rows[group] - 1}"

    def advice(self, error: BaseException) -> str:
        misfit = _MISFIT.search(first_line(error))
        if misfit is None:
            return super().advice(error)
        name, value = self.schema.names[int(misfit[1])], misfit[2]
        missing = [*self.text_format.missing, value]
        other = "" if _is_number(value) else f", or missing={missing!r} if it stands for no value"
        wider = "float32" if _is_number(value) and not value.isdecimal() else "string"
        return f"give column {name!r} its type: types={{{name!r}: {wider!r}}}{other}"

    def read(self, group: int, columns: Sequence[str]) -> Any:
        with self.reading(group), arrow_input(self.source) as file:
            data = _at(file, self.starts[group], self.starts[group + 1])
            types = {name: self.schema.field(name).type for name in columns}
            table = _parsed(data, tuple(self.schema.names), self.text_format, types)
        if table.num_rows != self.rows[group]:
            raise DataError(
                f"{self.place(group)}: got {table.num_rows} records; a quoted text has a line "
                "break, or the last quote is missing; write one record a line"
            )
        return table


def _header(file: Any, source: FoundFile, text_format: TextFormat) -> tuple[tuple[str, ...], int]:
    """The names of the columns, and where the records begin."""
    if text_format.names is not None:
        return text_format.names, 0
    data = _at(file, 0, min(source.size, _SAMPLE))
    end = data.find(b"\n") + 1
    if not end:
        raise DataError(f"{source.name}: got no line with the names of the columns")
    table = _parsed(data[:end], None, text_format, {})
    return tuple(table.column_names), end


def _stretches(
    file: Any, first: int, size: int, group_bytes: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Where the groups begin, and how many lines each has."""
    starts, rows = [first], []
    lines, at = 0, first
    while at < size:
        data = _at(file, at, min(size, at + group_bytes))
        at += len(data)
        end = data.rfind(b"\n") + 1 if at < size else len(data)
        lines += data.count(b"\n", 0, end) + (at >= size and not data.endswith(b"\n"))
        if end:
            starts.append(at - len(data) + end)
            rows.append(lines)
            lines = 0
            at = starts[-1]
    return tuple(starts), tuple(rows)


def _guess(
    file: Any, first: int, names: tuple[str, ...], text_format: TextFormat, source: FoundFile
) -> Any:
    """The types of the columns, by the first lines."""
    data = _at(file, first, min(source.size, first + _SAMPLE))
    if len(data) == _SAMPLE:
        data = data[: data.rfind(b"\n") + 1]
    if not data:
        pa = arrow()
        return pa.schema([(name, pa.string()) for name in names])
    pa, found = arrow(), _parsed(data, names, text_format, {}).schema
    # a column without values so far may have any
    fields = [
        (field.name, pa.string() if field.type == pa.null() else field.type) for field in found
    ]
    return pa.schema([(name, text_format.types.get(name, type_)) for name, type_ in fields])


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _at(file: Any, start: int, stop: int) -> bytes:
    file.seek(start)
    data: bytes = file.read(stop - start)
    return data


def _parsed(
    data: bytes, names: Sequence[str] | None, text_format: TextFormat, types: dict[str, Any]
) -> Any:
    csv, pa = arrow("pyarrow.csv"), arrow()
    return csv.read_csv(
        pa.BufferReader(data),
        csv.ReadOptions(column_names=names, use_threads=False, block_size=max(1, len(data))),
        csv.ParseOptions(delimiter=text_format.delimiter, ignore_empty_lines=False),
        csv.ConvertOptions(
            column_types=types,
            include_columns=list(types),
            null_values=list(text_format.missing),
            strings_can_be_null=True,
        ),
    )
