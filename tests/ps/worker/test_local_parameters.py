# SPDX-License-Identifier: Apache-2.0
"""Dense parameters of a worker, and the chunks in which they are sent."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fleetlight.ps.dtypes import NAMES, as_tensor, bfloat16_sum, flat_array, numpy_dtype
from fleetlight.ps.placement import Block, BlockSlice
from fleetlight.ps.update import TableGradients
from fleetlight.ps.worker.chunks import CHUNK_BYTES, Chunk, chunks_of
from fleetlight.ps.worker.local_parameters import LocalParameters

# LocalParameters: the parameters of the model, read and written in blocks.


def block(*slices: tuple[int, int, int], dtype: str = "float32") -> Block:
    block_slices, offset = [], 0
    for number, start, stop in slices:
        block_slices.append(BlockSlice(number, start, stop, offset))
        offset += stop - start
    return Block(0, 0, dtype, tuple(block_slices))


def parameters() -> list[torch.Tensor]:
    return [torch.arange(6.0).view(2, 3), torch.arange(10.0, 14.0)]


def test_slices_are_packed_in_order() -> None:
    live = LocalParameters(parameters())
    assert live.pack(block((0, 2, 5), (1, 0, 2))).tolist() == [2, 3, 4, 10, 11]


def test_written_lists_parameters_that_others_changed() -> None:
    tensors = parameters()
    live = LocalParameters(tensors)
    live.unpack(block((0, 0, 6)), np.zeros(6, np.float32))
    assert live.written() == []
    tensors[1].clamp_(max=11.0)
    assert live.written() == [1]
    live.note()
    assert live.written() == []


def test_packed_values_are_a_copy() -> None:
    tensors = parameters()
    packed = LocalParameters(tensors).pack(block((0, 0, 6)))
    tensors[0].zero_()
    assert packed.tolist() == [0, 1, 2, 3, 4, 5]


def test_given_values_are_packed_instead_of_parameters() -> None:
    values: dict[int, Any] = {0: np.full(6, 7, np.float32), 1: None}
    packed = LocalParameters(parameters()).pack(block((0, 4, 6), (1, 0, 2)), values)
    assert packed.tolist() == [7, 7, 0, 0]


@pytest.mark.parametrize("in_order", [True, False])
def test_slices_are_unpacked_into_the_parameters(in_order: bool) -> None:
    """Also into a parameter that is not contiguous."""
    tensors = parameters()
    if not in_order:
        tensors[0] = torch.tensor([[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]]).t()
    assert tensors[0].is_contiguous() is in_order
    live = LocalParameters(tensors)
    live.unpack(block((0, 1, 4), (1, 3, 4)), np.array([-1, -2, -3, -4], np.float32))
    assert tensors[0].tolist() == [[0, -1, -2], [-3, 4, 5]]
    assert tensors[1].tolist() == [10, 11, 12, -4]
    live.unpack(block((0, 0, 6)), np.arange(6, dtype=np.float32))
    assert tensors[0].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert live.flat(0).tolist() == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("dtype", NAMES)
def test_every_dtype_is_packed_and_unpacked(dtype: torch.dtype) -> None:
    tensors = [torch.tensor([1.5, -2.0, 3.0]).to(dtype)]
    live, name = LocalParameters(tensors), NAMES[dtype]
    packed = live.pack(block((0, 0, 3), dtype=name))
    assert packed.dtype == numpy_dtype(name)
    packed.flags.writeable = False
    tensors[0].zero_()
    live.unpack(block((0, 0, 3), dtype=name), packed)
    assert tensors[0].tolist() == [1.5, -2, 3]
    assert as_tensor(packed, dtype).tolist() == [1.5, -2, 3]


def test_bfloat16_sum_adds_values_not_bits() -> None:
    bits = [flat_array(torch.tensor([1.0, value], dtype=torch.bfloat16)) for value in (2.0, 0.5)]
    assert as_tensor(bfloat16_sum(bits), torch.bfloat16).tolist() == [2.0, 2.5]


# Chunks of differences: each row once, in order, to the server that owns it.


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
