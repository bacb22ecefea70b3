# SPDX-License-Identifier: Apache-2.0
"""`Codec`: the form in which consecutive values of a bucket travel; and casts to half precision."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from fleetlight.strategy import CompressionConfigs


class Span(NamedTuple):
    """The values [start:stop) of a segment; they are those of a parameter from `at` on."""

    name: str
    at: int
    start: int
    stop: int


@dataclasses.dataclass(frozen=True)
class CodecSegment:
    """Consecutive values of a bucket that are encoded together, and what their sender keeps.

    The tensors have the length of the segment; encoding changes them in place for the next step.
    """

    spans: Sequence[Span]
    #: what earlier messages dropped (error feedback); None: it is lost
    residual: Tensor | None = None
    #: momentum that accumulates before anything is sent
    velocity: Tensor | None = None


class Codec(Protocol):
    """One form. Messages of the same spans have the same length on all senders."""

    name: str
    #: whether any run of values can be a message of its own
    divisible: bool
    #: whether a sender accumulates momentum in `CodecSegment.velocity`
    has_velocity: bool

    def message_bytes(self, spans: Sequence[Span]) -> int:
        """The length of a message."""

    def encode(self, values: Tensor, segment: CodecSegment, message: Tensor) -> None:
        """Write float32 values into a message of bytes; may overwrite `values`."""

    def add(self, message: Tensor, spans: Sequence[Span], total: Tensor) -> None:
        """Add the values of a message to float32 values."""


@dataclasses.dataclass(frozen=True)
class CodecRecord:
    """A codec under the name of its file, and how a job makes it from its settings."""

    name: str
    make: Callable[[CompressionConfigs], Codec]


def make_codec(name: str, configs: CompressionConfigs) -> Codec:
    """Make the codec of `forms/<name>.py`."""
    module = importlib.import_module(f"{__package__}.forms.{name}")
    record: CodecRecord = module.RECORD
    return record.make(configs)


def narrow_type(asked: bool | str) -> torch.dtype | None:
    """The type that `fp16_allreduce` or `compression` asks for; None: no cast."""
    if asked == "bf16":
        return torch.bfloat16
    return torch.float16 if asked in (True, "fp16") else None


def narrowed(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    """The tensor cast to a narrower type, or itself where that saves nothing."""
    # the values of a sparse tensor travel with indices, which are most of its bytes
    is_wide = tensor.is_floating_point() and not tensor.is_sparse and tensor.element_size() > 2
    return tensor.to(dtype) if dtype is not None and is_wide else tensor
