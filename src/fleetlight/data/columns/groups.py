# SPDX-License-Identifier: Apache-2.0
"""`Groups`: the groups of all files, which columns they have, and how many records are read."""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from fleetlight.data.columns import arrow
from fleetlight.data.columns.conditions import Condition, mask_of
from fleetlight.data.columns.files.group_file import GroupFile
from fleetlight.data.columns.layout import ColumnKind, check_known, kind_of
from fleetlight.data.locations.files import in_threads
from fleetlight.errors import DataError, counted

T = TypeVar("T")

#: footers and conditions are read by so many threads
_THREADS = 8


@dataclasses.dataclass(frozen=True)
class RecordGroup:
    """Records of a file that are read together."""

    file: GroupFile
    number: int
    #: those that are read
    rows: int
    #: True where conditions leave some out
    is_filtered: bool

    @property
    def place(self) -> str:
        """Where it is, in errors."""
        return self.file.place(self.number)


class Groups:
    """The files of a data set. All have the same columns, as far as they are read."""

    def __init__(self, files: Sequence[GroupFile], conditions: Sequence[Condition]) -> None:
        self._files, self._conditions = files, conditions
        self._partitions = _partitions(files)
        #: of the first file, with those in the names of folders
        self.columns = [*files[0].schema.names]
        self.columns += [name for name in self._partitions if name not in self.columns]
        for one in conditions:
            check_known(one.column, self.columns, files[0].name)
            check_single(one.column, files)
        self.groups = [
            group for file in in_threads(self._groups_of, files, _THREADS) for group in file
        ]
        if not self.groups:
            raise DataError(f"{self.groups_name}: got no record for which the conditions are true")

    @property
    def groups_name(self) -> str:
        """The name of the data set in errors."""
        more = len(self._files) - 1
        return self._files[0].name + (f" and {counted(more, 'other file')}" if more else "")

    def kinds(self, columns: Sequence[str]) -> dict[str, ColumnKind]:
        """The kinds of these columns; an error names the file that differs."""
        for name in columns:
            check_single(name, self._files)
        first = self._files[0]
        found = {name: self._kind(first, name) for name in columns}
        for file in self._files[1:]:
            for name, kind in found.items():
                if not self._is_partition(name):
                    check_known(name, file.schema.names, file.name)
                now = self._kind(file, name)
                if now != kind:
                    raise DataError(
                        f"{file.name}, column {name!r}: got {now}, expected {kind} as in "
                        f"{first.name}; write the files with one schema"
                    )
        return found

    def read(self, group: RecordGroup, columns: Sequence[str]) -> Any:
        """The records of a group."""
        needed = list(columns)
        if group.is_filtered:
            needed += [one.column for one in self._conditions if one.column not in needed]
        table = self._read(group.file, group.number, needed)
        if group.is_filtered:
            table = table.filter(mask_of(self._conditions, table))
        return table

    def fingerprint(self) -> str:
        """Changes with the files, and not with the folder that they are in."""
        facts = [
            (file.name.rsplit("/", 1)[-1], file.source.size, file.rows) for file in self._files
        ]
        parts = [(group.number, group.rows) for group in self.groups]
        digest = hashlib.sha256(repr((facts, parts)).encode()).hexdigest()[:12]
        records = sum(group.rows for group in self.groups)
        return f"{len(self._files)} files, {records} records, {digest}"

    def _is_partition(self, name: str) -> bool:
        return name in self._partitions and name not in self._files[0].schema.names

    def _kind(self, file: GroupFile, name: str) -> ColumnKind:
        if self._is_partition(name):
            return kind_of(self._partitions[name][file.name].type, name, file.name)
        return kind_of(file.schema.field(name).type, name, file.name)

    def _groups_of(self, file: GroupFile) -> list[RecordGroup]:
        found = (self._group(file, number) for number in range(len(file.rows)))
        return [group for group in found if group.rows]

    def _group(self, file: GroupFile, number: int) -> RecordGroup:
        rows = file.rows[number]
        if not rows or not self._conditions:
            return RecordGroup(file, number, rows, is_filtered=False)
        names = [one.column for one in self._conditions]
        bounds = file.bounds(number, [name for name in names if not self._is_partition(name)])
        for name in names:
            if self._is_partition(name):
                value = self._partitions[name][file.name].as_py()
                bounds[name] = (value, value, value is None)
        decided = [one.decide(bounds) for one in self._conditions]
        if False in decided:
            return RecordGroup(file, number, 0, is_filtered=False)
        if None not in decided:
            return RecordGroup(file, number, rows, is_filtered=False)
        mask = mask_of(self._conditions, self._read(file, number, list(dict.fromkeys(names))))
        count = arrow("pyarrow.compute").sum(mask).as_py() or 0
        return RecordGroup(file, number, count, is_filtered=count != rows)

    def _read(self, file: GroupFile, number: int, columns: Sequence[str]) -> Any:
        pa = arrow()
        own = [name for name in columns if not self._is_partition(name)]
        # a table without columns would forget how many records it has
        table = file.read(number, own) if own else pa.table({"": pa.nulls(file.rows[number])})
        for name in columns:
            if self._is_partition(name):
                value = pa.repeat(self._partitions[name][file.name], table.num_rows)
                table = table.append_column(name, value)
        return table


def check_single(column: str, files: Sequence[GroupFile]) -> None:
    """DataError for a column of which a file has several."""
    for file in files:
        if file.schema.names.count(column) > 1:
            raise DataError(
                f"{file.name}: got {file.schema.names.count(column)} columns {column!r}, expected "
                "one; give each column a name of its own when you write the files"
            )


def opened(open_one: Callable[[T], GroupFile], sources: Sequence[T]) -> list[GroupFile]:
    """The files of sources that have records."""
    found = [file for file in in_threads(open_one, sources, _THREADS) if sum(file.rows)]
    if not found:
        raise DataError(f"{sources[0]}: got no records in {len(sources)} files, expected some")
    return found


def _partitions(files: Sequence[GroupFile]) -> Mapping[str, Mapping[str, Any]]:
    """The values in the names of folders: by column and file; only columns that all files have."""
    pa = arrow()
    own = {file.name: file.source.partition for file in files}
    names = [name for name in own[files[0].name] if all(name in one for one in own.values())]
    found: dict[str, dict[str, Any]] = {}
    for name in names:
        texts = {file: values[name] for file, values in own.items()}
        given = [text for text in texts.values() if text is not None]
        is_int = bool(given) and all(_is_int64(text) for text in given)
        kind, value_of = (pa.int64(), int) if is_int else (pa.string(), str)
        found[name] = {
            file: pa.scalar(None if text is None else value_of(text), kind)
            for file, text in texts.items()
        }
    return found


def _is_int64(text: str) -> bool:
    return bool(re.fullmatch(r"-?[0-9]+", text)) and -(2**63) <= int(text) < 2**63
