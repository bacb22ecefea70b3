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
    """Records of Parquet files.

    Args:
        files: names, patterns, folders, or a list of them, on this machine or in a bucket.
        columns: the columns to read, or {name in the batch: column, or columns side by side}.
        where: conditions such as [("day", ">=", 20)], all of which must be true.
        fill: what stands for a missing value, by column.
        transform: called with each batch.

    Returns:
        A data set; its `loader(batch_size)` makes batches.

    Raises:
        ConfigError: a column or a condition is wrong, or pyarrow is not installed.
        DataError: a file does not exist or cannot be read.

    Example:
        >>> import pyarrow, pyarrow.parquet
        >>> table = pyarrow.table({"user": [7, 8, 9], "day": [19, 20, 21]})
        >>> pyarrow.parquet.write_table(table, "clicks.parquet")
        >>> clicks = fleet.data.parquet("clicks.parquet", ["user"], where=[("day", ">=", 20)])
        >>> clicks.batch([0, 1])
        {'user': tensor([8, 9])}
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
    """Records of Arrow IPC or Feather files.

    Args:
        files: names, patterns, folders, or a list of them, on this machine or in a bucket.
        columns: as in `parquet`.
        where: as in `parquet`.
        fill: as in `parquet`.
        transform: as in `parquet`.

    Returns:
        A data set; its `loader(batch_size)` makes batches.

    Raises:
        ConfigError: a column or a condition is wrong, or pyarrow is not installed.
        DataError: a file does not exist or cannot be read.

    Example:
        >>> import pyarrow.feather
        >>> table = pyarrow.table({"user": [7, 9], "label": [1.0, 0.0]})
        >>> pyarrow.feather.write_feather(table, "clicks.arrow", compression="uncompressed")
        >>> fleet.data.arrow("clicks.arrow").batch([0, 1])
        {'user': tensor([7, 9]), 'label': tensor([1., 0.])}
    """
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

    Args:
        files: names, patterns, folders, or a list of them, on this machine or in a bucket.
        columns: as in `parquet`.
        delimiter: the character between two fields.
        names: the names of all columns, where the first line has none.
        types: types of columns, such as {"code": "string"}; else the first lines decide.
        missing: texts that stand for a missing value.
        where: as in `parquet`.
        fill: as in `parquet`.
        transform: as in `parquet`.

    Returns:
        A data set; its `loader(batch_size)` makes batches.

    Raises:
        ConfigError: an argument is wrong, or pyarrow is not installed.
        DataError: a file does not exist or cannot be read.

    Example:
        >>> from pathlib import Path
        >>> _ = Path("clicks.csv").write_text("user,label\n7,1\n9,0\n")
        >>> fleet.data.csv("clicks.csv").batch([0, 1])
        {'user': tensor([7, 9]), 'label': tensor([1, 0])}
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
    r"""Criteo's click logs, larger than memory: batches as those of the data set `Criteo`.

    Args:
        files: plain text, as in `csv`.
        transform: called with each batch, a `Record`.

    Returns:
        A data set; its `loader(batch_size)` makes batches.

    Raises:
        DataError: a file does not exist or cannot be read.

    Example:
        >>> from pathlib import Path
        >>> line = "1\t" + "\t".join(["5"] * 13 + ["68fd1e64"] * 26) + "\n"
        >>> _ = Path("day.txt").write_text(line)
        >>> fleet.data.criteo("day.txt").batch([0]).label
        tensor([1.])
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
