# SPDX-License-Identifier: Apache-2.0
"""Data sets that make a whole batch at once, and single records only on demand."""

from __future__ import annotations

import abc
from collections.abc import Iterator, Sequence
from typing import Any, Generic, NamedTuple, TypeVar, cast, overload

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, default_collate

#: a named tuple of tensors: a record, or a batch with one more dimension
B = TypeVar("B", bound=tuple[Tensor, ...])
Indices = Sequence[int] | NDArray[np.int64] | Tensor


class Record(NamedTuple):
    """One click or person; the tensors of a batch have one more dimension, in front.

    Args:
        dense: float32 `[numbers]`, about 1 in size.
        ids: int64 `[categories]`, of the whole range.
        label: float32, 0 or 1.

    Example:
        >>> record = fleet.data.ClickLog(10)[0]
        >>> record.dense.shape, record.ids.shape
        (torch.Size([13]), torch.Size([26]))
    """

    #: float32 [numbers], about 1 in size
    dense: Tensor
    #: int64 [categories], of the whole range
    ids: Tensor
    #: float32, 0 or 1
    label: Tensor


class BatchRecords(Sequence[B], Generic[B]):
    """A batch as a sequence of its records, which are made on access."""

    def __init__(self, batch: B) -> None:
        self.batch = batch

    def __len__(self) -> int:
        return len(self.batch[0])

    @overload
    def __getitem__(self, index: int) -> B: ...
    @overload
    def __getitem__(self, index: slice) -> list[B]: ...
    def __getitem__(self, index: int | slice) -> B | list[B]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        return self._row(index)

    def _row(self, place: int) -> B:
        return same_kind(self.batch, [column[place] for column in self.batch])

    def __iter__(self) -> Iterator[B]:
        for values in zip(*(column.unbind() for column in self.batch), strict=True):
            yield same_kind(self.batch, values)


class BatchedDataset(Dataset[B], abc.ABC, Generic[B]):
    """A map-style data set that makes whole batches."""

    #: True for generated records
    generated = False
    name = ""

    @abc.abstractmethod
    def __len__(self) -> int: ...

    @abc.abstractmethod
    def batch(self, indices: Indices) -> B:
        """These records as one batch."""

    def __getitem__(self, index: int) -> B:
        if not -len(self) <= index < len(self):
            raise IndexError(f"{self.name}: got record {index}, expected one of {len(self)}")
        return self.__getitems__([index % len(self)])[0]

    def __getitems__(self, indices: list[int]) -> Sequence[B]:
        """Several records at once, as DataLoader requests them."""
        return BatchRecords(self.batch(indices))

    @staticmethod
    def collate(rows: Sequence[B]) -> B:
        """For `DataLoader(collate_fn=...)`: keeps a batch that was made whole."""
        return (
            rows.batch if isinstance(rows, BatchRecords) else cast(B, default_collate(list(rows)))
        )

    def loader(self, batch_size: int, **settings: Any) -> DataLoader[B]:
        """A DataLoader that keeps batches whole, several times as fast as the default."""
        return DataLoader(self, batch_size, **{"collate_fn": self.collate, **settings})

    def __repr__(self) -> str:
        return f"<{self.name}: {len(self)} records>"


class TableDataset(BatchedDataset[B], Generic[B]):
    """Records in memory, as one tensor for each column."""

    def __init__(self, name: str, columns: B, *, generated: bool = False) -> None:
        self.generated = generated
        self.name = f"{name} (generated stand-in)" if generated else name
        self.columns = columns

    def __len__(self) -> int:
        return len(self.columns[0])

    def batch(self, indices: Indices) -> B:
        places = torch.as_tensor(indices, dtype=torch.int64)
        return same_kind(self.columns, [column[places] for column in self.columns])


def same_kind(like: B, columns: Sequence[Tensor]) -> B:
    """A named tuple of the type of `like`, with these tensors."""
    return cast(B, type(like)._make(columns))  # type: ignore[attr-defined]
