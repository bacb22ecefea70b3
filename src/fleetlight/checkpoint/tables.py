# SPDX-License-Identifier: Apache-2.0
"""`TableOnDisk`: the rows of a saved table by id, read in pieces.

The files are in the order of the servers that wrote them. They are mapped into memory; beside them
there are only the ids and their order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from fleetlight.checkpoint.manifest import TableEntry
from fleetlight.checkpoint.tensors import Streamed
from fleetlight.errors import CorruptCheckpointError

IDS, WEIGHTS = "ids", "weights"
#: rows in memory at a time
_PIECE = 1 << 16


class TableOnDisk:
    """The rows of a table, whatever number of servers kept them."""

    def __init__(self, entry: TableEntry, files: Sequence[Mapping[str, Tensor]]) -> None:
        self.entry = entry
        self._files = files
        every = [file[IDS] for file in files]
        #: the ids, ascending, and where each stands when all files are put one behind another
        self.ids, self._places = torch.cat([*every, torch.empty(0, dtype=torch.int64)]).sort()
        self._starts = torch.tensor([0, *(len(ids) for ids in every)]).cumsum(0)
        if len(self.ids) != entry.rows:
            raise CorruptCheckpointError(
                f"table {entry.name!r}: its files have {len(self.ids)} rows, the manifest says "
                f"{entry.rows}; load another checkpoint"
            )

    def weight(self) -> Streamed:
        """The rows, in the order of `ids`."""
        return Streamed(torch.float32, (len(self.ids), self.entry.dim), self._pieces)

    def dense(self) -> Streamed:
        """The whole weight of a layer of torch that was moved onto the table."""
        expected = torch.arange(self.entry.ids)
        if not torch.equal(self.ids, expected):
            raise CorruptCheckpointError(
                f"table {self.entry.name!r} has {len(self.ids)} rows, expected one for each id "
                f"from 0 to {self.entry.ids - 1}; load another checkpoint"
            )
        return self.weight()

    def _pieces(self) -> Iterator[Tensor]:
        for start in range(0, len(self._places), _PIECE):
            places = self._places[start : start + _PIECE]
            piece = torch.empty(len(places), self.entry.dim)
            of_file = torch.searchsorted(self._starts, places, right=True) - 1
            for number, file in enumerate(self._files):
                mine = of_file == number
                piece[mine] = file[WEIGHTS][places[mine] - self._starts[number]]
            yield piece


def whole(streamed: Streamed) -> Tensor:
    """A streamed tensor, in memory."""
    return torch.cat([torch.empty(0, *streamed.shape[1:]), *streamed.pieces()])
