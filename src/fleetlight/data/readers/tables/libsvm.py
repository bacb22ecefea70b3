# SPDX-License-Identifier: Apache-2.0
"""The LibSVM format: a label, then the nonzero features."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fleetlight.data.readers.lines import lines_of, parsed
from fleetlight.data.records import BatchedDataset, BatchRecords, Indices
from fleetlight.errors import DataError

_QUERY = b"qid:"


class SparseRows(NamedTuple):
    """Records of different lengths, concatenated as `nn.EmbeddingBag` takes them.

    Args:
        ids: int64, the features of all records, as in the file.
        values: float32, the value of each.
        offsets: int64, where each record starts.
        label: float32, one for each record.
        query: int64, the query of each record; -1 without one.

    Example:
        >>> rows = fleet.data.LibSVM.parse([b"1 3:0.5 10:1", b"0 3:2"])
        >>> rows.ids.tolist(), rows.offsets.tolist()
        ([3, 10, 3], [0, 2])
    """

    #: int64, the features of all records, as in the file
    ids: Tensor
    #: float32, the value of each
    values: Tensor
    #: int64, where each record starts
    offsets: Tensor
    #: float32, one for each record
    label: Tensor
    #: int64, the query of each record; -1 without one
    query: Tensor


class LibSVM(BatchedDataset[SparseRows]):
    r"""Sparse records from a file of lines such as `1 qid:7 3:0.5 10:1  # a comment`.

    A batch is a `SparseRows`: use `data.loader(batch_size)`, or `collate_fn=data.collate`.

    Args:
        path: the file, plain or gzip.

    Raises:
        DataError: the file cannot be read, or a line has another format.

    Example:
        >>> from pathlib import Path
        >>> _ = Path("clicks.libsvm").write_text("1 3:0.5 10:1\n0 3:2\n")
        >>> next(iter(fleet.data.LibSVM("clicks.libsvm").loader(2))).label
        tensor([1., 0.])
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.name = f"LibSVM {os.fspath(path)}"
        parts = parsed(Path(path), lines_of(os.fspath(path)), LibSVM.parse)
        self._rows = concatenated(list(parts))

    def __len__(self) -> int:
        return len(self._rows.label)

    def batch(self, indices: Indices) -> SparseRows:
        return selected(self._rows, torch.as_tensor(indices, dtype=torch.int64))

    def __getitems__(self, indices: list[int]) -> Sequence[SparseRows]:
        return SparseRowList(self.batch(indices))

    @staticmethod
    def collate(rows: Sequence[SparseRows]) -> SparseRows:
        """One batch of several, with their records in order."""
        return rows.batch if isinstance(rows, BatchRecords) else concatenated(rows)

    @staticmethod
    def parse(lines: Sequence[bytes]) -> SparseRows:
        """The records of some lines."""
        words = [line.split(b"#", 1)[0].split() for line in lines]
        if not all(words):
            raise DataError("got only a comment, expected: label index:value ...")
        query = torch.tensor([_take_query(line) for line in words])
        pairs = list(itertools.chain.from_iterable(line[1:] for line in words))
        if wrong := [pair for pair in pairs if pair.count(b":") != 1]:
            raise DataError(f"got {wrong[0].decode(errors='replace')!r}, expected index:value")
        halves = b":".join(pairs).split(b":") if pairs else []
        return SparseRows(
            _numbers(halves[0::2], np.int64, "a whole number as index"),
            _numbers(halves[1::2], np.float32, "a number as value"),
            _starts(torch.tensor([len(line) - 1 for line in words])),
            _numbers([line[0] for line in words], np.float32, "a number as label"),
            query,
        )


class SparseRowList(BatchRecords[SparseRows]):
    """The records of a batch, each as a `SparseRows`."""

    def __len__(self) -> int:
        return len(self.batch.label)

    def __iter__(self) -> Iterator[SparseRows]:
        return (self._row(place) for place in range(len(self)))

    def _row(self, place: int) -> SparseRows:
        return selected(self.batch, torch.tensor([range(len(self))[place]]))


def selected(rows: SparseRows, chosen: Tensor) -> SparseRows:
    """The chosen records."""
    last = len(rows.label) - 1
    starts, following = rows.offsets[chosen], rows.offsets[(chosen + 1).clamp(max=last)]
    lengths = torch.where(chosen == last, len(rows.ids), following) - starts
    offsets = _starts(lengths)
    # the place of each feature = the start of its record + its offset there
    places = torch.arange(int(lengths.sum())) + (starts - offsets).repeat_interleave(lengths)
    return SparseRows(
        rows.ids[places], rows.values[places], offsets, rows.label[chosen], rows.query[chosen]
    )


def concatenated(parts: Sequence[SparseRows]) -> SparseRows:
    """The records of several parts, concatenated."""
    ids, values, _, label, query = (torch.cat(columns) for columns in zip(*parts, strict=True))
    shifts = _starts(torch.tensor([len(part.ids) for part in parts]))
    offsets = [part.offsets + shift for part, shift in zip(parts, shifts, strict=True)]
    return SparseRows(ids, values, torch.cat(offsets), label, query)


def _starts(lengths: Tensor) -> Tensor:
    return lengths.cumsum(0) - lengths


def _take_query(words: list[bytes]) -> int:
    """Remove the query from the words of a line, and return it."""
    if len(words) > 1 and words[1].startswith(_QUERY):
        return int(_numbers([words.pop(1)[len(_QUERY) :]], np.int64, "a whole number as query"))
    return -1


def _numbers(texts: list[bytes], dtype: type[Any], what: str) -> Tensor:
    try:
        numbers = np.array(texts, np.bytes_).astype(dtype)
    except (ValueError, OverflowError) as error:
        raise DataError(f"{error}; expected {what}") from None
    if wrong := np.flatnonzero(~np.isfinite(numbers)).tolist():
        raise DataError(f"got {texts[wrong[0]].decode()!r}, expected {what}")
    return torch.from_numpy(numbers)
