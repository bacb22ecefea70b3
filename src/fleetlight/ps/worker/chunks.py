# SPDX-License-Identifier: Apache-2.0
"""The differences of GeoSGD in pieces: while one server answers, another is sent its next piece."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from numpy.typing import NDArray

from fleetlight.ps.update import TableGradients

Array = NDArray[Any]
#: long enough for a message to cost little beside its bytes, short enough to overlap with others
CHUNK_BYTES = 1 << 20
#: with one server nothing overlaps, and each piece waits for its answer: fewer, but a server has to
#: hold them
LONE_CHUNK_BYTES = 4 << 20


@dataclasses.dataclass
class Chunk:
    """What one server is sent at once."""

    #: of each table, from which row to which
    spans: dict[int, slice] = dataclasses.field(default_factory=dict)
    blocks: Sequence[Array] = ()

    def arrays(self, tables: Mapping[int, TableGradients]) -> list[Array]:
        """Ids and differences of each table, then the dense differences."""
        found: list[Array] = []
        for number, span in self.spans.items():
            found += [tables[number].ids[span], tables[number].gradients[span]]
        return [*found, *self.blocks]


def chunks_of(
    tables: Mapping[int, TableGradients],
    blocks: Sequence[Array],
    server: int,
    piece_bytes: int,
) -> list[Chunk]:
    """All that goes to one server; the dense blocks travel whole, with the first rows."""
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
