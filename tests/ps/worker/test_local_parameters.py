# SPDX-License-Identifier: Apache-2.0
"""LocalParameters: the parameters of the model, read and written in blocks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from fleetlight.ps.dtypes import NAMES, as_tensor, bfloat16_sum, flat_array, numpy_dtype
from fleetlight.ps.placement import Block, BlockSlice
from fleetlight.ps.worker.local_parameters import LocalParameters


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
