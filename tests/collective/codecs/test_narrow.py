# SPDX-License-Identifier: Apache-2.0
"""Narrow types: what travels narrower, and what is left as it is."""

from __future__ import annotations

import pytest
import torch

from fleetlight.collective.codecs.codec import narrow_type, narrowed


@pytest.mark.parametrize(
    ("asked", "dtype"),
    [
        (True, torch.float16),
        ("fp16", torch.float16),
        ("bf16", torch.bfloat16),
        (False, None),
        ("none", None),
        ("int8", None),
    ],
)
def test_what_a_strategy_asks_for(asked: bool | str, dtype: torch.dtype | None) -> None:
    assert narrow_type(asked) is dtype


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_wide_values_travel_narrower(dtype: torch.dtype) -> None:
    for wide in (torch.float32, torch.float64):
        sent = narrowed(torch.tensor([1.0, 2.5], dtype=wide), dtype)
        assert sent.dtype is dtype
        assert sent.tolist() == [1.0, 2.5]


@pytest.mark.parametrize(
    "tensor",
    [
        torch.ones(2, dtype=torch.bfloat16),
        torch.ones(2, dtype=torch.complex64),
        torch.ones(2, dtype=torch.int64),
        torch.eye(3).to_sparse(),
    ],
    ids=["narrow already", "complex", "whole numbers", "sparse"],
)
def test_what_gains_nothing_is_left_as_it_is(tensor: torch.Tensor) -> None:
    assert narrowed(tensor, torch.float16) is tensor


def test_what_nobody_asks_to_be_narrow_is_left_as_it_is() -> None:
    tensor = torch.ones(2)
    assert narrowed(tensor, None) is tensor
