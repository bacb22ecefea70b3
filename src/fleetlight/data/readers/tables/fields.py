# SPDX-License-Identifier: Apache-2.0
"""`Fields`: lines cut at a separator, as spans of one buffer, so that NumPy parses them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fleetlight.data.hashing import hash_spans, salt_key
from fleetlight.errors import DataError

_LINE_END = ord("\n")
#: characters of a number, at most
_MAX_NUMBER_LENGTH = 64


@dataclasses.dataclass(frozen=True)
class Fields:
    """The fields of some lines; `starts` and `lengths` are `[lines, columns]`."""

    buffer: NDArray[np.uint8]
    starts: NDArray[np.int64]
    lengths: NDArray[np.int64]
    #: the names of the columns, for ids and errors
    names: Sequence[str]

    @classmethod
    def of(cls, lines: Sequence[bytes], separator: bytes, names: Sequence[str]) -> Fields:
        """Cut lines, each of which must have a field for each name."""
        text = b"\n".join([line.rstrip(b"\r\n") for line in lines]) + b"\n"
        buffer = np.frombuffer(text, np.uint8)
        ends = np.flatnonzero((buffer == ord(separator)) | (buffer == _LINE_END))
        is_last = buffer[ends] == _LINE_END
        counts = np.diff(np.flatnonzero(is_last), prepend=-1)
        if len(wrong := np.flatnonzero(counts != len(names))):
            raise DataError(
                f"got {counts[wrong[0]]} fields between {separator.decode()!r}, "
                f"expected {len(names)}: {names[0]} to {names[-1]}"
            )
        starts = np.concatenate([[0], ends[:-1] + 1])
        shape = len(lines), len(names)
        return cls(buffer, starts.reshape(shape), (ends - starts).reshape(shape), names)

    def __getitem__(self, columns: slice) -> Fields:
        return Fields(
            self.buffer, self.starts[:, columns], self.lengths[:, columns], self.names[columns]
        )

    def only(self, names: Sequence[str]) -> Fields:
        """Some of the columns."""
        columns = [self.names.index(name) for name in names]
        return Fields(self.buffer, self.starts[:, columns], self.lengths[:, columns], names)

    def numbers(self, missing: float | None = None) -> Tensor:
        """All fields as float64; empty ones become `missing`, and are an error without it."""
        texts = self.texts(_MAX_NUMBER_LENGTH)
        if missing is not None:
            texts = np.where(self.lengths == 0, str(missing).encode(), texts)
        return self._cast(texts, np.float64)

    def integers(self) -> Tensor:
        """All fields as int64."""
        return self._cast(self.texts(_MAX_NUMBER_LENGTH), np.int64)

    def ids(self) -> Tensor:
        """All fields as ids, with the column's name as salt; an empty field has an id too."""
        keys = np.array([salt_key(name) for name in self.names], np.uint64)
        return torch.from_numpy(hash_spans(self.buffer, self.starts, self.lengths, keys))

    def texts(self, longest: int) -> NDArray[np.bytes_]:
        """The bytes of all fields."""
        width = max(1, int(self.lengths.max(initial=0)))
        if width > longest:
            raise DataError(f"got a field of {width} characters, expected no more than {longest}")
        columns = np.arange(width)
        places = np.minimum(self.starts[..., None] + columns, len(self.buffer) - 1)
        inside = columns < self.lengths[..., None]
        return np.where(inside, self.buffer[places], 0).astype(np.uint8).view(f"S{width}")[..., 0]

    def _cast(self, texts: NDArray[np.bytes_], dtype: type[Any]) -> Tensor:
        try:
            return torch.from_numpy(_finite(texts, dtype))
        except (ValueError, OverflowError):
            kind = "a whole number" if dtype is np.int64 else "a number"
            name, text = self._first_wrong(texts, dtype)
            raise DataError(f"got {text!r} as {name}, expected {kind}") from None

    def _first_wrong(self, texts: NDArray[np.bytes_], dtype: type[Any]) -> tuple[str, str]:
        """Column and text of the first field that is not such a number."""
        for column, name in enumerate(self.names):
            for text in texts[:, column].tolist():
                try:
                    _finite(np.array([text]), dtype)
                except (ValueError, OverflowError):
                    return name, text.decode(errors="replace")
        raise AssertionError("all fields are numbers")


def _finite(texts: NDArray[np.bytes_], dtype: type[Any]) -> NDArray[Any]:
    values = texts.astype(dtype)
    if not np.isfinite(values).all():
        raise ValueError("not finite")
    return values
