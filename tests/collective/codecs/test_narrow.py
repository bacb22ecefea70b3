# SPDX-License-Identifier: Apache-2.0
"""Narrow types: which tensors are narrowed, and which are unchanged."""

import pytest
import torch

from fleetlight.collective.codecs.codec import narrow_type, narrowed


@pytest.mark.parametrize(
    ("setting", "dtype"),
    [
        (True, torch.float16),
        ("fp16", torch.float16),
        ("bf16", torch.bfloat16),
        (False, None),
        ("none", None),
        ("int8", None),
    ],
)
def test_the_strategy_chooses_the_type(setting: bool | str, dtype: torch.dtype | None) -> None:
    assert narrow_type(setting) is dtype


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_wide_values_are_narrowed(dtype: torch.dtype) -> None:
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
def test_tensors_without_a_narrower_form_are_unchanged(tensor: torch.Tensor) -> None:
    assert narrowed(tensor, torch.float16) is tensor


def test_without_a_narrow_type_tensors_are_unchanged() -> None:
    tensor = torch.ones(2)
    assert narrowed(tensor, None) is tensor
