# SPDX-License-Identifier: Apache-2.0
"""Which columns a batch has, and of which kind each is. Pure but for Arrow's types."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from fleetlight.data.columns import arrow
from fleetlight.errors import ConfigError, DataError, did_you_mean

#: names of columns, or by the name in the batch: a column, or columns side by side
Columns = Sequence[str] | Mapping[str, str | Sequence[str]] | None

INTS, FLOATS, TEXTS = "whole numbers", "floats", "texts"


@dataclasses.dataclass(frozen=True)
class ColumnKind:
    """What the values of a column are."""

    values: str
    #: a list of values in each record
    is_list: bool = False
    #: values of each record in a list of fixed length
    width: int = 0
    #: what dates and times count, such as timestamp[ms]
    unit: str = ""

    def __str__(self) -> str:
        values = f"{self.values} of {self.unit}" if self.unit else self.values
        if self.width:
            return f"lists of {self.width} {values}"
        return f"lists of {values}" if self.is_list else values


@dataclasses.dataclass(frozen=True)
class Output:
    """One entry of a batch."""

    name: str
    columns: tuple[str, ...]
    #: True where the columns are side by side, in one matrix
    is_matrix: bool


def outputs_of(columns: Columns, known: Sequence[str], where: str) -> list[Output]:
    """The entries of a batch, from what the user gave; `known`: the columns of the files."""
    if isinstance(columns, str):
        raise ConfigError(f"columns={columns!r}: got a text, expected a list of names")
    if columns is None:
        columns = known
    if not isinstance(columns, Mapping):
        columns = {name: name for name in columns}
    found = []
    for name, given in columns.items():
        own = (given,) if isinstance(given, str) else tuple(given)
        if not own:
            raise ConfigError(f"columns: {name!r} has no columns, expected at least one")
        for column in own:
            check_known(column, known, where)
        found.append(Output(name, own, is_matrix=not isinstance(given, str)))
    if not found:
        raise ConfigError("columns: got none, expected at least one name")
    return found


def check_known(column: str, known: Sequence[str], where: str) -> None:
    """DataError for a column that the files lack."""
    if column not in known:
        raise DataError(f"{where}: no column {column!r}; {did_you_mean(column, known)}")


def kind_of(type_: Any, column: str, where: str) -> ColumnKind:
    """The kind of a column of this Arrow type."""
    types = arrow("pyarrow.types")
    if types.is_dictionary(type_):
        return kind_of(type_.value_type, column, where)
    if types.is_fixed_size_list(type_):
        inner = kind_of(type_.value_type, column, where)
        return dataclasses.replace(inner, width=type_.list_size)
    if types.is_list(type_) or types.is_large_list(type_):
        return dataclasses.replace(kind_of(type_.value_type, column, where), is_list=True)
    if types.is_temporal(type_):
        # the time zone does not change the number
        unit = f"timestamp[{type_.unit}]" if types.is_timestamp(type_) else str(type_)
        return ColumnKind(INTS, unit=unit)
    if types.is_integer(type_) or types.is_boolean(type_):
        return ColumnKind(INTS)
    if types.is_floating(type_):
        return ColumnKind(FLOATS)
    if any(
        check(type_)
        for check in (
            types.is_string,
            types.is_large_string,
            types.is_binary,
            types.is_large_binary,
        )
    ):
        return ColumnKind(TEXTS)
    raise DataError(
        f"{where}, column {column!r}: got {type_}, expected whole numbers, floats, texts, or lists "
        "of them; leave the column out, or convert it when you write the files"
    )


def check_together(output: Output, kinds: Mapping[str, ColumnKind]) -> None:
    """ConfigError for columns that do not fit in one matrix."""
    own = {column: kinds[column] for column in output.columns}
    if not output.is_matrix:
        return
    for column, kind in own.items():
        if kind.is_list or kind.width:
            raise ConfigError(
                f"columns: {output.name!r} puts column {column!r} beside others, but it has "
                f"{kind}; give it a name of its own"
            )
    texts = [column for column, kind in own.items() if kind.values == TEXTS]
    floats = [column for column, kind in own.items() if kind.values == FLOATS]
    if texts and floats:
        raise ConfigError(
            f"columns: {output.name!r} has texts ({texts[0]}), which become ids, and floats "
            f"({floats[0]}); give them different names"
        )
