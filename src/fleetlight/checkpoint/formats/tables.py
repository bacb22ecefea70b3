# SPDX-License-Identifier: Apache-2.0
"""`TableOnDisk`: the rows of a saved table by id, read in pieces.

The files are in the order of the servers that wrote them, those of a base before those of a delta.
They are mapped into memory; beside them there are only the ids and their order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from fleetlight.checkpoint.formats.tensors import StreamedTensor, read_tensors
from fleetlight.checkpoint.storage.manifest import REMOVED, TableEntry
from fleetlight.errors import CorruptCheckpointError

IDS, WEIGHTS = "ids", "weights"
#: rows in memory at a time
_PIECE = 1 << 16


class TableOnDisk:
    """The rows of a table, from the files of any number of servers."""

    def __init__(self, entry: TableEntry, files: Sequence[Mapping[str, Tensor]]) -> None:
        """`files`: in the order of the entry's."""
        self.entry = entry
        parts = [(its.part, file) for its, file in zip(entry.files, files, strict=False)]
        #: the files with rows
        self._files = [file for part, file in parts if part != REMOVED]
        # rows of the base that were removed, or that a delta replaces
        hidden = _joined([file[IDS] for part, file in parts if part])
        every = [file[IDS] for file in self._files]
        kept = [
            torch.ones(len(file[IDS]), dtype=torch.bool)
            if part or not len(hidden)
            else ~torch.isin(file[IDS], hidden)
            for part, file in parts
            if part != REMOVED
        ]
        places = torch.cat([*kept, torch.empty(0, dtype=torch.bool)]).nonzero()[:, 0]
        #: the ids, ascending, and where each stands when all files are concatenated
        self.ids, order = _joined(every)[places].sort()
        self._places = places[order]
        self._starts = torch.tensor([0, *(len(ids) for ids in every)]).cumsum(0)
        if len(self.ids) != entry.rows:
            raise CorruptCheckpointError(
                f"table {entry.name!r}: its files have {len(self.ids)} rows, the manifest says "
                f"{entry.rows}; load another checkpoint"
            )

    def weight(self) -> StreamedTensor:
        """The rows, in the order of `ids`."""
        return StreamedTensor(torch.float32, (len(self.ids), self.entry.dim), self._pieces)

    def dense(self) -> StreamedTensor:
        """The materialize weight of a layer of torch that was moved onto the table."""
        expected = torch.arange(self.entry.ids)
        if not torch.equal(self.ids, expected):
            raise CorruptCheckpointError(
                f"table {self.entry.name!r} has {len(self.ids)} rows, expected one for each id "
                f"from 0 to {self.entry.ids - 1}; load another checkpoint"
            )
        return self.weight()

    def exported(self) -> dict[str, Tensor | StreamedTensor]:
        """The entries of a plain state dict: ids and rows, or the whole weight under its names."""
        if self.entry.ids:
            return dict.fromkeys(self.entry.weights, self.dense())
        return {f"{self.entry.name}.ids": self.ids, f"{self.entry.name}.weight": self.weight()}

    def _pieces(self) -> Iterator[Tensor]:
        for start in range(0, len(self._places), _PIECE):
            places = self._places[start : start + _PIECE]
            piece = torch.empty(len(places), self.entry.dim)
            of_file = torch.searchsorted(self._starts, places, right=True) - 1
            for number, file in enumerate(self._files):
                mine = of_file == number
                piece[mine] = file[WEIGHTS][places[mine] - self._starts[number]]
            yield piece


def _joined(ids: Sequence[Tensor]) -> Tensor:
    return torch.cat([*ids, torch.empty(0, dtype=torch.int64)])


def materialize(streamed: StreamedTensor) -> Tensor:
    """A streamed tensor, in memory."""
    out, done = torch.empty(streamed.shape), 0
    for piece in streamed.pieces():
        out[done : done + len(piece)] = piece
        done += len(piece)
    return out


def read_tables(folder: Path, entries: Sequence[TableEntry]) -> dict[str, Tensor]:
    """All rows of tables whose files are in a folder, in memory."""
    found: dict[str, Tensor] = {}
    for entry in entries:
        table = TableOnDisk(entry, [read_tensors(folder / file.name) for file in entry.files])
        for name, value in table.exported().items():
            found[name] = value if isinstance(value, Tensor) else materialize(value)
    return found
