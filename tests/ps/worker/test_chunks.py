# SPDX-License-Identifier: Apache-2.0
"""Chunks of differences: each row once, in order, to the server that owns it."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from fleetlight.ps.update import TableGradients
from fleetlight.ps.worker.chunks import CHUNK_BYTES, Chunk, chunks_of

DIMS = (1, 4)
counts = st.tuples(st.integers(0, 9), st.integers(0, 9))


def tables(first: tuple[int, int], second: tuple[int, int]) -> dict[int, TableGradients]:
    built = {}
    for number, (sizes, dim) in enumerate(zip((first, second), DIMS, strict=True)):
        ids = np.arange(sum(sizes))
        rows = np.full((len(ids), dim), number, np.float32)
        built[number] = TableGradients(ids, np.cumsum([0, *sizes]), rows)
    return built


def row_bytes(number: int) -> int:
    return 8 + 4 * DIMS[number]


@given(counts, counts, st.integers(0, 1), st.integers(1, 120), st.booleans())
def test_each_row_is_sent_once_in_chunks_below_the_limit(
    first: tuple[int, int], second: tuple[int, int], server: int, limit: int, dense: bool
) -> None:
    parts = tables(first, second)
    blocks = [np.ones(3, np.float32)] if dense else []
    chunks = chunks_of(parts, blocks, server, limit)
    for number, part in parts.items():
        spans = [chunk.spans[number] for chunk in chunks if number in chunk.spans]
        sent = [i for span in spans for i in part.ids[span].tolist()]
        assert sent == list(range(part.starts[server], part.starts[server + 1]))
    assert [len(chunk.blocks) for chunk in chunks] == ([1] if dense else []) + [0] * (
        len(chunks) - dense
    )
    for chunk in chunks:
        sizes = [(n, span.stop - span.start) for n, span in chunk.spans.items()]
        total = sum(row_bytes(n) * count for n, count in sizes)
        # a chunk is never empty, and a single row may exceed the limit
        assert sizes or chunk.blocks
        assert total <= limit or sum(count for _, count in sizes) == 1


def test_a_chunk_sends_ids_and_rows_of_each_table_then_blocks() -> None:
    parts = tables((2, 0), (1, 1))
    block = np.ones(3, np.float32)
    [chunk] = chunks_of(parts, [block], 0, CHUNK_BYTES)
    sent = {number: [part.gradients] for number, part in parts.items()}
    ids, rows, other_ids, other_rows, last = chunk.arrays(parts, sent)
    assert (ids.tolist(), rows.tolist()) == ([0, 1], [[0], [0]])
    assert (other_ids.tolist(), other_rows.tolist()) == ([0], [[1, 1, 1, 1]])
    assert last is block
    assert Chunk().arrays(parts, sent) == []
