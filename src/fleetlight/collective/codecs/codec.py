# SPDX-License-Identifier: Apache-2.0
"""What a codec is: a form in which consecutive values of a bucket travel, and back."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor


class Span(NamedTuple):
    """The values [start:stop) of a stretch are those of a parameter from `at` on."""

    name: str
    at: int
    start: int
    stop: int


@dataclasses.dataclass(frozen=True)
class CodecSegment:
    """Consecutive values of a bucket that are encoded at once, and what the sender keeps of them.

    What is kept has the length of the stretch, is changed in place, and is there the next time.
    """

    spans: Sequence[Span]
    #: what was not sent so far; None: it is dropped
    owed: Tensor | None = None
    #: momentum that gathers before anything is sent
    velocity: Tensor | None = None


class Codec(Protocol):
    """One form. Messages of the same spans have the same length, whoever sends them."""

    name: str
    #: whether any run of values can be a message of its own
    divisible: bool
    #: whether a sender gathers momentum for it, in `CodecSegment.velocity`
    has_velocity: bool

    def message_bytes(self, spans: Sequence[Span]) -> int:
        """How long a message is."""

    def encode(self, values: Tensor, stretch: CodecSegment, message: Tensor) -> None:
        """Write float32 values into a message of bytes; `values` may be overwritten."""

    def add(self, message: Tensor, spans: Sequence[Span], total: Tensor) -> None:
        """Add what a message holds to float32 values."""


def narrow_type(asked: bool | str) -> torch.dtype | None:
    """The type that a strategy's `fp16_allreduce` or `compression` asks for; None: as it is."""
    if asked == "bf16":
        return torch.bfloat16
    return torch.float16 if asked in (True, "fp16") else None


def narrowed(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    """What travels: the tensor itself when nothing is to be gained."""
    # the values of a sparse tensor travel with indices, which are most of its bytes
    is_wide = tensor.is_floating_point() and not tensor.is_sparse and tensor.element_size() > 2
    return tensor.to(dtype) if dtype is not None and is_wide else tensor
