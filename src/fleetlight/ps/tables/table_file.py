# SPDX-License-Identifier: Apache-2.0
"""The file of a table: safetensors, written and read in pieces.

Its tensors are `ids`, `weights`, a `state.<name>` for each state of the rule, and `meta` for the
counts of admission. Rows of a checkpoint are in bucket order, and `buckets` has the start of each
bucket. A file for the recovery of the same server is unordered and has no such index. A table can
exceed the free memory, so each piece is written to its place in every tensor at once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from fleetlight.errors import CheckpointError, CorruptCheckpointError
from fleetlight.kernels import BUCKETS, Rule
from fleetlight.ps.update import Floats, Ids

_T = TypeVar("_T", covariant=True)
#: called between two pieces of work; it may sleep, or raise to end the work
Pause = Callable[[], None]
WEIGHTS, META = "weights", "meta"
#: `part` of a file: rows that replace those of the base, or ids whose rows were removed since
DELTA, REMOVED = "delta", "removed"
IDS, INDEX = "ids", "buckets"
_CODES: Mapping[str, np.dtype[Any]] = {"I64": np.dtype("<i8"), "F32": np.dtype("<f4")}
_READ_BYTES = 8 << 20


@dataclasses.dataclass(frozen=True)
class Column:
    """Floats `start:stop` of every row, which are one tensor of the file."""

    name: str
    start: int
    stop: int


class TableWriter(Protocol[_T]):
    """Writes the rows of a table, as `write_table` does."""

    def __call__(
        self,
        columns: Iterable[Column],
        rows: int,
        pieces: Iterable[tuple[Ids, Floats]],
        about: Mapping[str, str],
        pause: Pause = ...,
        starts: NDArray[np.int64] | None = ...,
        /,
    ) -> _T:
        """Write rows piece by piece."""


def columns_of(dim: int, rule: Rule, meta_width: int) -> list[Column]:
    """The columns of a row [weights | state | meta]."""
    widths = [*((n, dim) for n in rule.weight_state), *((n, 1) for n in rule.row_state)]
    states = [(f"state.{name}", width) for name, width in widths]
    meta = [(META, meta_width)] if meta_width else []
    columns, start = [], 0
    for name, size in [(WEIGHTS, dim), *states, *meta]:
        columns.append(Column(name, start, start + size))
        start += size
    return columns


def no_pause() -> None:
    """Continue without a pause."""


def write_table(
    path: Path,
    columns: Iterable[Column],
    rows: int,
    pieces: Iterable[tuple[Ids, Floats]],
    about: Mapping[str, str],
    pause: Pause = no_pause,
    starts: NDArray[np.int64] | None = None,
) -> tuple[int, str]:
    """Write rows piece by piece; return the size and the checksum of the file.

    `starts`: the start of each bucket, if rows come in bucket order.
    """
    columns = list(columns)
    header, offsets, size = layout(columns, rows, about, starts)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        _write_at(fd, 0, np.frombuffer(header, np.uint8))
        if starts is not None:
            _write_at(fd, offsets[INDEX], starts)
        done = 0
        for ids, values in pieces:
            _write_at(fd, offsets[IDS] + 8 * done, ids)
            for column in columns:
                part = np.ascontiguousarray(values[:, column.start : column.stop])
                _write_at(fd, offsets[column.name] + 4 * done * part.shape[1], part)
            done += len(ids)
            pause()
        if done != rows:
            raise CheckpointError(f"{path}: got {done} rows, expected {rows}; the file was removed")
        os.fsync(fd)
        return size, _checksum(fd, pause)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(path)
        raise
    finally:
        os.close(fd)


def layout(
    columns: Iterable[Column],
    rows: int,
    about: Mapping[str, str],
    starts: NDArray[np.int64] | None,
) -> tuple[bytes, dict[str, int], int]:
    """The header of a file, the offset of each tensor in it, and its size."""
    shapes: dict[str, tuple[str, list[int]]] = {IDS: ("I64", [rows])}
    if starts is not None:
        shapes[INDEX] = ("I64", [len(starts)])
    shapes |= {c.name: ("F32", [rows, c.stop - c.start]) for c in columns}
    return _header(shapes, about)


class TableReader:
    """The file of a table, mapped into memory: pages are read when they are used."""

    def __init__(self, path: Path | str, content: NDArray[np.uint8] | None = None) -> None:
        """`content`: that of an object, whose URL is `path`."""
        self.path = path
        try:
            header, data = _divided(_mapped(path) if content is None else content)
            self.about = _texts(header.pop("__metadata__", {}))
            self._tensors = {name: _tensor(data, entry) for name, entry in header.items()}
            self._starts = self._tensors.pop(INDEX, None)
            self._rows = len(self._tensors[IDS])
            if self._starts is not None:
                _check_index(self._starts, self._rows)
            if any(len(tensor) != self._rows for tensor in self._tensors.values()):
                raise ValueError("its tensors have different numbers of rows")
        except OSError as error:
            raise CheckpointError(
                f"{path} cannot be read: {error.strerror or error}; check the folder and its "
                "disk, or load another checkpoint"
            ) from error
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise CorruptCheckpointError(
                f"{path} is not the file of a table: {error}; load another checkpoint"
            ) from error

    @property
    def part(self) -> str:
        """`DELTA` or `REMOVED`; "": the rows of a whole table."""
        return self.about.get("part", "")

    def width(self, column: str) -> int | None:
        """The number of floats of a column in a row; None if the file does not have it."""
        tensor = self._tensors.get(column)
        return None if tensor is None else int(tensor.shape[1])

    def compare(self, size: int, sha256: str) -> None:
        """Raise if the size or the checksum of the file differs."""
        with open(self.path, "rb") as file:
            got = os.fstat(file.fileno()).st_size, _checksum(file.fileno())
        if got != (size, sha256):
            raise CorruptCheckpointError(
                f"{self.path} was changed after it was written: got {got[0]} bytes with sha256 "
                f"{got[1]}, expected {size} with {sha256}; load another checkpoint"
            )

    def span(self, buckets: range | None) -> tuple[int, int]:
        """The range of rows in these buckets; None: all rows."""
        if buckets is None:
            return 0, self._rows
        if self._starts is None:
            raise CheckpointError(
                f"{self.path} has no index of its rows: only the server that wrote it can read it; "
                "load the folder of a checkpoint"
            )
        return int(self._starts[buckets.start]), int(self._starts[buckets.stop])

    def pieces(
        self, buckets: range | None, columns: Iterable[Column], blank: Floats, rows: int
    ) -> Iterator[tuple[Ids, Floats]]:
        """The rows of these buckets, `rows` at a time; missing columns are as in `blank`."""
        known = [c for c in columns if c.name in self._tensors]
        first, last = self.span(buckets)
        for start in range(first, last, rows):
            stop = min(start + rows, last)
            values = np.tile(blank, (stop - start, 1))
            for column in known:
                tensor = self._tensors[column.name]
                # the metadata of a file may have fewer columns, or more
                width = min(column.stop - column.start, tensor.shape[1])
                values[:, column.start : column.start + width] = tensor[start:stop, :width]
            yield np.array(self._tensors[IDS][start:stop]), values


@contextlib.contextmanager
def table_errors(name: str) -> Iterator[None]:
    """Inside the block, errors about a damaged file name the table."""
    try:
        yield
    except CorruptCheckpointError as error:
        raise CorruptCheckpointError(f"table {name!r}: {error}") from error


def refuse_other_columns(reader: TableReader, table: str, columns: list[Column], rule: str) -> None:
    """Raise if the columns of a file differ from those of a table; metadata may."""
    where = f"{reader.path} does not fit table {table!r}"
    if reader.part == REMOVED:
        return
    for column in shared_columns(reader, columns, rule):
        got, expected = reader.width(column.name), column.stop - column.start
        if column.name == WEIGHTS and got != expected:
            raise CheckpointError(f"{where}: its rows have {got} weights, expected {expected}")
        if column.name != META and got != expected:
            raise CheckpointError(
                f"{where}: its {column.name!r} is {got} wide, expected {expected}"
            )


def shared_columns(reader: TableReader, columns: list[Column], rule: str) -> list[Column]:
    """Columns to load from a file; the state of another rule is not loaded."""
    if reader.about.get("rule") == rule:
        return columns
    return [column for column in columns if column.name in (WEIGHTS, META)]


def _check_index(starts: NDArray[Any], rows: int) -> None:
    if starts.shape != (BUCKETS + 1,) or starts[-1] != rows:
        raise ValueError("its index does not fit its ids")
    if (np.diff(starts) < 0).any() or starts[0] != 0:
        raise ValueError("its index is not in order")


def _header(
    shapes: Mapping[str, tuple[str, list[int]]], about: Mapping[str, str]
) -> tuple[bytes, dict[str, int], int]:
    """The header, the offset of each tensor in the file, and the size of the file."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt", **about}}
    relative, end = {}, 0
    for name, (code, shape) in shapes.items():
        relative[name] = end
        end += int(np.prod(shape)) * _CODES[code].itemsize
        entries[name] = {"dtype": code, "shape": shape, "data_offsets": [relative[name], end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    return header, {n: len(header) + at for n, at in relative.items()}, len(header) + end


def _write_at(fd: int, offset: int, array: NDArray[Any]) -> None:
    if not array.size:
        return
    view = np.ascontiguousarray(array).data.cast("B")
    while view:
        done = os.pwrite(fd, view, offset)
        offset += done
        view = view[done:]


def _checksum(fd: int, pause: Pause = no_pause) -> str:
    """The checksum of the whole file, computed at the end because all tensors grow together."""
    digest, offset = hashlib.sha256(), 0
    buffer = memoryview(bytearray(_READ_BYTES))
    while size := os.preadv(fd, [buffer], offset):
        digest.update(buffer[:size])
        offset += size
        pause()
    return digest.hexdigest()


def _mapped(path: Path | str) -> NDArray[np.uint8]:
    return np.asarray(np.memmap(path, np.uint8, "r"))


def _divided(data: NDArray[np.uint8]) -> tuple[dict[str, Any], NDArray[np.uint8]]:
    """The header of a safetensors file, and the data after it."""
    length = int.from_bytes(data[:8].tobytes(), "little")
    if len(data) < 8 + length:
        raise ValueError(f"it has {len(data)} bytes, less than its header")
    header = json.loads(data[8 : 8 + length].tobytes())
    return header, data[8 + length :]


def _texts(about: Any) -> dict[str, str]:
    """The metadata of a file."""
    if not all(isinstance(text, str) for pair in about.items() for text in pair):
        raise ValueError("its metadata is not text")
    return dict(about)


def _tensor(data: NDArray[np.uint8], entry: Mapping[str, Any]) -> NDArray[Any]:
    start, stop = entry["data_offsets"]
    if not 0 <= start <= stop <= len(data):
        raise ValueError(f"it was truncated: it has {len(data)} bytes of data, not {stop}")
    values = data[start:stop].view(_CODES[entry["dtype"]])
    return np.reshape(values, entry["shape"])
