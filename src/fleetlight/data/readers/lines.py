# SPDX-License-Identifier: Apache-2.0
"""The lines of text files, with the file and number of each."""

from __future__ import annotations

import glob
import gzip
import itertools
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, TypeVar, cast

import torch

from fleetlight.data.readers.files import GZIP_MAGIC
from fleetlight.data.records import B, same_kind
from fleetlight.errors import DataError

#: bytes, file, and number in the file, from 1; a plain tuple, because lines are many
Line = tuple[bytes, str, int]
Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
T = TypeVar("T")

_CHUNK = 16_384


def existing(paths: Paths) -> list[str]:
    """The files of a list, or sorted those of one name or pattern such as `logs/day_*`."""
    if isinstance(paths, (str, os.PathLike)):
        name = os.fspath(paths)
        found = [name] if os.path.exists(name) else sorted(glob.glob(name))
    else:
        name, found = "an empty list", [os.fspath(path) for path in paths]
    if absent := [path for path in found if not os.path.isfile(path)]:
        raise DataError(f"{absent[0]}: not a file; nothing is downloaded")
    if not found:
        raise DataError(f"got {name}: no such file in {os.getcwd()}; nothing is downloaded")
    return found


def lines_of(path: str, header: int = 0) -> Iterator[Line]:
    """The lines of a file, plain or gzip, without blank ones and the `header` first ones."""
    number = 0
    try:
        with _opened(path) as file:
            for number, text in enumerate(file, start=1):
                if number > header and not text.isspace():
                    yield text, path, number
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(
            f"{path}, after line {number}: cannot be read ({error}); get the file again"
        ) from error


def located(parse: Callable[[list[bytes]], T], lines: Sequence[Line]) -> T:
    """The batch that `parse` makes of lines; its error names the first line at fault."""
    try:
        return parse([text for text, _, _ in lines])
    except (ValueError, LookupError, ArithmeticError):
        for text, path, number in lines:
            _try_one(parse, text, f"{path}, line {number}")
        raise


def table_of(
    path: Path, parse: Callable[[list[bytes]], B], is_header: Callable[[bytes], bool] | None = None
) -> B:
    """All records of a file as one batch."""
    lines = lines_of(str(path))
    if is_header is not None:
        lines = (line for line in lines if not is_header(line[0]))
    parts = list(parsed(path, lines, parse))
    return same_kind(parts[0], [torch.cat(columns) for columns in zip(*parts, strict=True)])


def parsed(path: Path, lines: Iterator[Line], parse: Callable[[list[bytes]], T]) -> Iterator[T]:
    """The batches of a file, at least one."""
    is_empty = True
    for chunk in chunks(lines, _CHUNK):
        is_empty = False
        yield located(parse, chunk)
    if is_empty:
        raise DataError(f"{path}: got no records, expected at least one")


def chunks(items: Iterator[T], size: int) -> Iterator[list[T]]:
    """Lists of `size` items; the last may be shorter."""
    while chunk := list(itertools.islice(items, size)):
        yield chunk


def _opened(path: str) -> IO[bytes]:
    with open(path, "rb") as file:
        magic = file.read(len(GZIP_MAGIC))
    opened = gzip.open if magic == GZIP_MAGIC else open
    return cast("IO[bytes]", opened(path, "rb"))


def _try_one(parse: Callable[[list[bytes]], T], text: bytes, place: str) -> None:
    try:
        parse([text])
    except DataError as error:
        raise DataError(f"{place}: {error}") from error
    except (ValueError, LookupError, ArithmeticError) as error:
        raise DataError(f"{place}: {type(error).__name__}: {error}") from error
