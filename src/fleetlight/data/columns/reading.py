# SPDX-License-Identifier: Apache-2.0
"""`parquet`, `arrow` and `csv`: data sets over files of these formats."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from fleetlight.data.columns import arrow as pyarrow
from fleetlight.data.columns.conditions import Where, conditions_of
from fleetlight.data.columns.dataset import Batch, ColumnFiles
from fleetlight.data.columns.files.columnar_file import ArrowFile, ParquetFile
from fleetlight.data.columns.files.text_file import TextFile, TextFormat
from fleetlight.data.columns.groups import Groups, opened
from fleetlight.data.columns.layout import Columns
from fleetlight.data.locations.files import FoundFile
from fleetlight.data.locations.paths import Paths, sources_of
from fleetlight.data.readers.tables.criteo import CATEGORIES, COUNTS, NAMES, scaled
from fleetlight.data.records import Record
from fleetlight.errors import ConfigError

Transform = Callable[[Batch], Any]


def parquet(
    files: Paths,
    columns: Columns = None,
    *,
    where: Where | None = None,
    fill: Mapping[str, Any] | None = None,
    transform: Transform | None = None,
) -> ColumnFiles:
    """Records of Parquet files: names, patterns, folders, or a list of them.

    `columns`: the columns to read, or {name in the batch: column, or list of columns side by
    side}. `where`: conditions such as [("day", ">=", 20)], all of which must be true. `fill`: by
    column, what stands for a missing value. `transform`: called with each batch.
    """
    found = opened(ParquetFile.at, sources_of(files, (".parquet", ".pq")))
    return _data_set(found, columns, where, fill, transform)


def arrow(
    files: Paths,
    columns: Columns = None,
    *,
    where: Where | None = None,
    fill: Mapping[str, Any] | None = None,
    transform: Transform | None = None,
) -> ColumnFiles:
    """Records of Arrow IPC or Feather files; the arguments are those of `parquet`."""
    found = opened(ArrowFile.at, sources_of(files, (".arrow", ".feather", ".ipc")))
    return _data_set(found, columns, where, fill, transform)


def csv(
    files: Paths,
    columns: Columns = None,
    *,
    delimiter: str = ",",
    names: Sequence[str] | None = None,
    types: Mapping[str, str] | None = None,
    missing: Sequence[str] = ("",),
    where: Where | None = None,
    fill: Mapping[str, Any] | None = None,
    transform: Transform | None = None,
) -> ColumnFiles:
    r"""Records of text files, one a line.

    `names`: of all columns, where the first line has none. `types`: of columns, such as
    {"code": "string"}; else the first lines decide. `missing`: texts that stand for a missing
    value. The other arguments are those of `parquet`.
    """
    if len(delimiter) != 1:
        raise ConfigError(f"csv: got delimiter={delimiter!r}, expected one character")
    known = None if names is None else tuple(names)
    own = {name: _type(name, text) for name, text in (types or {}).items()}
    form = TextFormat(delimiter, known, tuple(missing), types=own)
    sources = sources_of(files, (".csv", ".tsv", ".txt"))
    rest = partial(TextFile.at, text_format=form, schema=_first_schema(sources, form))
    return _data_set(opened(rest, sources), columns, where, fill, transform)


def criteo(files: Paths, *, transform: Callable[[Record], Any] | None = None) -> ColumnFiles:
    """Criteo's click logs, larger than memory: batches as those of the data set `Criteo`.

    `files`: plain text, as in `csv`. `transform`: called with each batch, a `Record`.
    """

    numbers = ("label", *COUNTS)
    return csv(
        files,
        {"dense": COUNTS, "ids": CATEGORIES, "label": "label"},
        delimiter="\t",
        names=NAMES,
        types={**dict.fromkeys(numbers, "float32"), **dict.fromkeys(CATEGORIES, "string")},
        fill={**dict.fromkeys(COUNTS, 0), **dict.fromkeys(CATEGORIES, "")},
        transform=partial(_record, transform),
    )


def _first_schema(sources: Sequence[FoundFile], form: TextFormat) -> Any:
    """The schema of the first file with records: without some nothing is known of its types."""
    found = (TextFile.at(source, form) for source in sources)
    first = next((file for file in found if sum(file.rows)), None)
    return None if first is None else first.schema


def _record(transform: Callable[[Record], Any] | None, batch: Batch) -> Any:
    found = Record(scaled(batch["dense"]), batch["ids"], batch["label"])
    return found if transform is None else transform(found)


def _type(name: str, text: str) -> Any:
    try:
        return pyarrow().type_for_alias(text)
    except ValueError as error:
        raise ConfigError(
            f"csv: types={{{name!r}: {text!r}}}: not a type of Arrow; expected such as int64, "
            "float32 or string"
        ) from error


def _data_set(
    files: Any,
    columns: Columns,
    where: Where | None,
    fill: Mapping[str, Any] | None,
    transform: Transform | None,
) -> ColumnFiles:
    groups = Groups(files, conditions_of(where))
    return ColumnFiles(groups, columns, fill=fill, transform=transform)
