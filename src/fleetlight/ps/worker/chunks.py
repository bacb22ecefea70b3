# SPDX-License-Identifier: Apache-2.0
"""Splits GeoSGD differences into chunks: one server replies while another receives a chunk."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from numpy.typing import NDArray

from fleetlight.ps.update import TableGradients

Array = NDArray[Any]
#: large enough to amortise the cost of a message, small enough to overlap with other servers
CHUNK_BYTES = 1 << 20
#: with one server nothing overlaps, and each chunk waits for its reply: fewer and larger chunks,
#: within the memory of the server
LONE_CHUNK_BYTES = 4 << 20


@dataclasses.dataclass
class Chunk:
    """The part of an exchange in one message to one server."""

    #: by table: a range of rows
    spans: dict[int, slice] = dataclasses.field(default_factory=dict)
    blocks: Sequence[Array] = ()

    def arrays(
        self, tables: Mapping[int, TableGradients], sent: Mapping[int, Sequence[Array]]
    ) -> list[Array]:
        """Ids and `sent` differences of each table, then the dense differences."""
        found: list[Array] = []
        for number, span in self.spans.items():
            found += [tables[number].ids[span], *(array[span] for array in sent[number])]
        return [*found, *self.blocks]


def chunks_of(
    tables: Mapping[int, TableGradients],
    blocks: Sequence[Array],
    server: int,
    piece_bytes: int,
) -> list[Chunk]:
    """Split the differences for one server; the first chunk has all dense blocks."""
    pieces, left = [Chunk(blocks=blocks)], piece_bytes
    for number, part in tables.items():
        start, stop = int(part.starts[server]), int(part.starts[server + 1])
        row_bytes = part.ids.itemsize + part.gradients.shape[1] * part.gradients.itemsize
        while start < stop:
            if left < row_bytes and pieces[-1].spans:
                pieces.append(Chunk())
                left = piece_bytes
            count = min(stop - start, max(1, left // row_bytes))
            pieces[-1].spans[number] = slice(start, start + count)
            start, left = start + count, left - count * row_bytes
    return [piece for piece in pieces if piece.spans or piece.blocks]
