# SPDX-License-Identifier: Apache-2.0
"""The codec: what travels narrower, and what is left as it is."""

from __future__ import annotations

import pytest
import torch

from fleetlight.collective.codec import Codec


@pytest.mark.parametrize(("asked", "dtype"), [(True, torch.float16), ("bf16", torch.bfloat16)])
def test_a_bucket_travels_narrower_and_comes_back(asked: bool | str, dtype: torch.dtype) -> None:
    codec, bucket = Codec.of(asked), torch.tensor([1.0, 2.5])
    sent = codec.encode(bucket)
    assert sent.dtype is dtype
    assert codec.decode(sent.mul_(2), bucket) is bucket
    assert bucket.tolist() == [2.0, 5.0]


@pytest.mark.parametrize(
    "bucket",
    [
        torch.ones(2, dtype=torch.bfloat16),
        torch.ones(2, dtype=torch.complex64),
        torch.eye(3).to_sparse(),
    ],
    ids=["narrow already", "complex", "sparse"],
)
def test_what_gains_nothing_is_left_as_it_is(bucket: torch.Tensor) -> None:
    assert Codec.of(True).encode(bucket) is bucket
    assert Codec.of(False).encode(bucket) is bucket
