# SPDX-License-Identifier: Apache-2.0
"""Assigns rows and dense parameters to servers. Pure: every process derives it from the plan.

The virtual bucket of an id selects the server of its row. A dense parameter goes to the server
with the smallest load; a large one is split across servers if its rule is elementwise.
"""

from __future__ import annotations

import dataclasses
import itertools
import math

from fleetlight.kernels import BUCKETS
from fleetlight.ps.plan import Plan

#: elementwise parameters above this many elements are split
CUT_ABOVE = 1 << 16
#: split at vector-register boundaries: torch rounds the remainder of a vector loop differently
CUT_UNIT = 64


@dataclasses.dataclass(frozen=True)
class BlockSlice:
    """Elements `start:stop` of a flattened parameter, and their offset in the block."""

    parameter: int
    start: int
    stop: int
    offset: int

    @property
    def size(self) -> int:
        """Number of elements."""
        return self.stop - self.start


@dataclasses.dataclass(frozen=True)
class Block:
    """All slices of one optimizer and dtype on one server: one flat array on the wire."""

    server: int
    optimizer: int
    dtype: str
    pieces: tuple[BlockSlice, ...]

    @property
    def size(self) -> int:
        """Number of elements."""
        return sum(piece.size for piece in self.pieces)


class Placement:
    """The blocks of dense parameters on each server."""

    def __init__(self, plan: Plan) -> None:
        self._by_server: list[list[Block]] = _blocks(plan) if plan.serves_dense else []
        self._server_num = plan.server_num

    def blocks_of(self, server: int, optimizer: int | None = None) -> list[Block]:
        """The blocks of a server (of one optimizer), in wire order."""
        if not self._by_server:
            return []
        blocks = self._by_server[server]
        return [b for b in blocks if optimizer is None or b.optimizer == optimizer]


def buckets_of(server: int, server_num: int) -> range:
    """The id buckets whose rows a server stores."""
    first, stop = (-(-BUCKETS * number // server_num) for number in (server, server + 1))
    return range(first, stop)


def _blocks(plan: Plan) -> list[list[Block]]:
    """Place the largest parameters first; the slices of an optimizer stay in order."""
    loads = [0] * plan.server_num
    placed: list[dict[tuple[int, str], list[tuple[int, int, int]]]]
    placed = [{} for _ in range(plan.server_num)]
    sizes = [math.prod(dense.shape) for dense in plan.dense]
    for number in sorted(range(len(plan.dense)), key=lambda n: (-sizes[n], n)):
        dense = plan.dense[number]
        for start, stop in _cuts(plan, dense.optimizer, sizes[number]):
            server = loads.index(min(loads))
            loads[server] += stop - start
            key = dense.optimizer, dense.dtype
            placed[server].setdefault(key, []).append((number, start, stop))
    return [
        [_block(server, *key, sorted(spans)) for key, spans in sorted(blocks.items())]
        for server, blocks in enumerate(placed)
    ]


def _cuts(plan: Plan, optimizer: int, size: int) -> list[tuple[int, int]]:
    """Split a parameter of `size` elements into equal spans, one for each server."""
    if plan.server_num == 1 or size <= CUT_ABOVE or not plan.optimizers[optimizer].elementwise:
        return [(0, size)]
    units = size // CUT_UNIT
    cuts = [units * n // plan.server_num * CUT_UNIT for n in range(plan.server_num)]
    return list(itertools.pairwise([*cuts, size]))


def _block(server: int, optimizer: int, dtype: str, spans: list[tuple[int, int, int]]) -> Block:
    pieces, offset = [], 0
    for number, start, stop in spans:
        pieces.append(BlockSlice(number, start, stop, offset))
        offset += stop - start
    return Block(server, optimizer, dtype, tuple(pieces))
