# SPDX-License-Identifier: Apache-2.0
"""From an Arrow table to arrays of which batches are taken."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fleetlight.data.columns import arrow
from fleetlight.data.columns.layout import FLOATS, INTS, TEXTS, ColumnKind, Output
from fleetlight.data.hashing import salt_key
from fleetlight.errors import DataError
from fleetlight.kernels.arrays import Ids
from fleetlight.kernels.columns import SideBySide, hash_buffer


class Ragged(NamedTuple):
    """Lists of values; those of record i begin at offsets[i], as for torch's EmbeddingBag.

    Args:
        values: the values of all records.
        offsets: where the values of each record begin.

    Example:
        >>> lists = fleet.data.Ragged(torch.tensor([7, 9, 9]), torch.tensor([0, 2]))
        >>> nn.EmbeddingBag(10, 4)(lists.values, lists.offsets).shape
        torch.Size([2, 4])
    """

    values: Tensor
    offsets: Tensor


@dataclasses.dataclass(frozen=True)
class Dense:
    """One value, or one row of a matrix, for each record."""

    values: NDArray[Any]

    def slice(self, start: int, stop: int) -> Tensor:
        """Records that follow each other; a copy, since the script may change its batches."""
        return torch.from_numpy(self.values[start:stop].copy())

    def take(self, rows: Ids) -> Tensor:
        """These records."""
        return torch.from_numpy(self.values.take(rows, axis=0))


@dataclasses.dataclass(frozen=True)
class Beside:
    """Columns that become a matrix: batch by batch where they are read in turn."""

    columns: SideBySide

    def slice(self, start: int, stop: int) -> Tensor:
        """Records that follow each other."""
        return torch.from_numpy(self.columns.rows(start, stop))

    def take(self, rows: Ids) -> Tensor:
        """These records."""
        return torch.from_numpy(self._whole.take(rows, axis=0))

    @functools.cached_property
    def _whole(self) -> NDArray[Any]:
        return self.columns.rows()


@dataclasses.dataclass(frozen=True)
class Lists:
    """A list of values for each record."""

    values: NDArray[Any]
    #: one more than records
    offsets: Ids

    def slice(self, start: int, stop: int) -> Ragged:
        """Records that follow each other."""
        first, last = self.offsets[start], self.offsets[stop]
        offsets = self.offsets[start:stop] - first
        values = torch.from_numpy(self.values[first:last].copy())
        return Ragged(values, torch.from_numpy(offsets))

    def take(self, rows: Ids) -> Ragged:
        """These records."""
        starts = self.offsets[rows]
        lengths = self.offsets[rows + 1] - starts
        offsets = np.cumsum(lengths) - lengths
        places = np.repeat(starts - offsets, lengths) + np.arange(lengths.sum())
        return Ragged(torch.from_numpy(self.values[places]), torch.from_numpy(offsets))


Column = Dense | Beside | Lists


@dataclasses.dataclass(frozen=True)
class Decoder:
    """Turns the tables of files into columns."""

    outputs: Sequence[Output]
    kinds: Mapping[str, ColumnKind]
    #: what stands for a missing value, by column
    fill: Mapping[str, Any]

    def decode(self, table: Any, where: str) -> dict[str, Column]:
        """The entries of all batches of a table."""
        return {one.name: self._decode(table, one, where) for one in self.outputs}

    def _decode(self, table: Any, output: Output, where: str) -> Column:
        if not output.is_matrix:
            (name,) = output.columns
            kind = self.kinds[name]
            if kind.is_list or kind.width:
                return self._lists(table, name, where)
            return Dense(self._values(table, name, where))
        is_float = any(self.kinds[name].values == FLOATS for name in output.columns)
        columns = [self._values(table, name, where) for name in output.columns]
        return Beside(SideBySide(columns, floats=is_float))

    def _values(self, table: Any, name: str, where: str) -> NDArray[Any]:
        """One value for each record."""
        array, place = _counted(_in_one(table.column(name))), _place(where, name)
        if array.null_count:
            array = self._filled(array, name, place)
        return _flat(array, self.kinds[name], name, place)

    def _lists(self, table: Any, name: str, where: str) -> Dense | Lists:
        array, kind, place = _in_one(table.column(name)), self.kinds[name], _place(where, name)
        # a list that is missing may stand for an empty one
        if array.null_count and not (kind.is_list and self.fill.get(name) == []):
            array = self._filled(array, name, place)
        if kind.is_list:
            lengths = _lengths(array, place)
        inner = _counted(array.flatten())
        if inner.null_count:
            inner = self._filled(inner, name, place)
        values = _flat(inner, kind, name, place)
        if kind.is_list:
            return Lists(values, np.concatenate([[0], np.cumsum(lengths)]))
        return Dense(values.reshape(len(array), kind.width))

    def _filled(self, array: Any, name: str, place: str) -> Any:
        if self.fill.get(name, []) == []:
            row = array.is_valid().to_numpy(zero_copy_only=False).argmin()
            raise DataError(
                f"{place}: {array.null_count} values are missing, the first in row {int(row)}; "
                f"say what stands for them: fill={{{name!r}: ...}}"
            )
        value, kind = self.fill[name], self.kinds[name]
        try:
            if arrow("pyarrow.types").is_dictionary(array.type):
                array = array.dictionary_decode()
            filled = arrow().scalar(value, array.type)
            # Arrow makes 0 of 0.5
            is_exact = kind.unit or np.array_equal(filled.as_py(), value)
            if kind.values == INTS and not is_exact:
                raise DataError(
                    f"{place}: fill={{{name!r}: {value!r}}} does not fit {array.type}, expected "
                    "whole numbers"
                )
            return array.fill_null(filled)
        except arrow().ArrowException as error:
            raise DataError(
                f"{place}: fill={{{name!r}: {value!r}}} does not fit {array.type} ({error})"
            ) from error


def _place(where: str, name: str) -> str:
    return f"{where}, column {name!r}"


def _in_one(column: Any) -> Any:
    if column.num_chunks == 1:
        return column.chunk(0)
    return column.combine_chunks()


def _counted(array: Any) -> Any:
    """An array whose `null_count` has all missing values, including those of its dictionary."""
    if arrow("pyarrow.types").is_dictionary(array.type) and array.dictionary.null_count:
        return array.dictionary_decode()
    return array


def _lengths(array: Any, place: str) -> Ids:
    """The length of each list; raises before Arrow trusts those of a damaged file."""
    offsets = array.offsets.to_numpy()
    lengths: Ids = np.diff(offsets).astype(np.int64)
    if array.null_count:
        lengths[~array.is_valid().to_numpy(zero_copy_only=False)] = 0
    if (lengths < 0).any():
        row = int(np.flatnonzero(lengths < 0)[0])
        raise DataError(f"{place}: row {row} has a list of negative length; write it again")
    if len(lengths) and not 0 <= offsets[0] <= offsets[-1] <= len(array.values):
        raise DataError(
            f"{place}: its lists are values {offsets[0]} to {offsets[-1]} of {len(array.values)}; "
            "write it again"
        )
    return lengths


def _flat(array: Any, kind: ColumnKind, name: str, place: str) -> NDArray[Any]:
    """The values of an array without missing ones."""
    types = arrow("pyarrow.types")
    if types.is_dictionary(array.type):
        values = _flat(array.dictionary, kind, name, place)
        taken: NDArray[Any] = values.take(array.indices.to_numpy())
        return taken
    if kind.values == TEXTS:
        return _text_ids(array, name, place)
    if types.is_temporal(array.type):
        bits = 32 if array.type.bit_width == 32 else 64
        array = array.cast(f"int{bits}")
    numbers = array.to_numpy(zero_copy_only=False)
    if kind.values == FLOATS:
        return _floats(numbers, place)
    converted: NDArray[Any] = numbers.astype(np.int64, copy=False)
    return converted


def _floats(numbers: NDArray[Any], place: str) -> NDArray[Any]:
    """The same numbers as float32."""
    try:
        with np.errstate(over="raise"):
            converted: NDArray[Any] = numbers.astype(np.float32, copy=False)
    except FloatingPointError as error:
        with np.errstate(over="ignore"):
            is_beyond = np.isinf(numbers.astype(np.float32)) & np.isfinite(numbers)
        raise DataError(
            f"{place}: got {numbers[is_beyond][0]}, expected at most {np.finfo(np.float32).max}, "
            "the largest float32; scale the column when you write the files, or leave it out"
        ) from error
    return converted


def _text_ids(array: Any, name: str, place: str) -> Ids:
    """An id for each text, salted with the column as in `hash_column`."""
    if not len(array):
        return np.empty(0, np.int64)
    is_large = array.type in (arrow().large_string(), arrow().large_binary())
    _, offsets, data = array.buffers()
    width = np.int64 if is_large else np.int32
    starts = np.frombuffer(offsets, width)[array.offset : array.offset + len(array) + 1]
    ids = np.empty(len(array), np.int64)
    buffer = np.empty(0, np.uint8) if data is None else np.frombuffer(data, np.uint8)
    key = int(salt_key(name).view(np.int64))
    row = hash_buffer(buffer, starts.astype(np.int64), key, ids)
    if row >= 0:
        raise DataError(
            f"{place}: row {row} has a text at bytes {starts[row]} to {starts[row + 1]} of "
            f"{len(buffer)}; write it again"
        )
    return ids


def joined(parts: Sequence[Any], places: Ids | None = None) -> Any:
    """One entry of a batch from parts of several groups; `places`: where each record belongs."""
    if isinstance(parts[0], Ragged):
        lists = [
            Lists(part.values.numpy(), np.append(part.offsets.numpy(), len(part.values)))
            for part in parts
        ]
        values = np.concatenate([one.values for one in lists])
        lengths = np.concatenate([np.diff(one.offsets) for one in lists])
        whole = Lists(values, np.concatenate([[0], np.cumsum(lengths)]))
        return whole.slice(0, len(lengths)) if places is None else whole.take(places)
    found = torch.cat(list(parts))
    return found if places is None else found[torch.from_numpy(places)]
