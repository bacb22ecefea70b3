# SPDX-License-Identifier: Apache-2.0
"""In which form a bucket travels: as it is, or in a narrower floating-point type."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor


@dataclasses.dataclass(frozen=True)
class Codec:
    """Casts floating-point buckets to `dtype` for the wire; None leaves them as they are."""

    dtype: torch.dtype | None = None

    @classmethod
    def of(cls, fp16_allreduce: bool | str) -> Codec:
        """The codec a strategy's `fp16_allreduce` asks for."""
        if fp16_allreduce is False:
            return cls()
        return cls(torch.bfloat16 if fp16_allreduce == "bf16" else torch.float16)

    def encode(self, bucket: Tensor) -> Tensor:
        """What travels: the bucket itself when nothing is to be gained."""
        # the values of a sparse tensor travel with indices, which are most of its bytes
        narrow = self.dtype is not None and bucket.is_floating_point() and not bucket.is_sparse
        if narrow and bucket.element_size() > 2:
            return bucket.to(self.dtype)
        return bucket

    def decode(self, sent: Tensor, bucket: Tensor) -> Tensor:
        """The reduced values, back in the bucket they came from."""
        return bucket if sent is bucket else bucket.copy_(sent)
