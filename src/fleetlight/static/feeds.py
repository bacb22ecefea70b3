# SPDX-License-Identifier: Apache-2.0
"""Feeds: what a program is given by name at each run, and what it refuses."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fleetlight.errors import ConfigError, did_you_mean

#: sizes of a tensor; None is any size
Shape = tuple[int | None, ...]


@dataclasses.dataclass(frozen=True)
class Feed:
    """A tensor that comes from outside."""

    name: str
    shape: Shape
    dtype: torch.dtype
    #: sizes of the same name must be equal, in all feeds of a program
    ties: tuple[str | None, ...] = ()

    def __str__(self) -> str:
        sizes = ", ".join("?" if size is None else str(size) for size in self.shape)
        return f"{self.name}: {str(self.dtype).removeprefix('torch.')}[{sizes}]"

    def accepted(self, value: Any) -> Tensor:
        """The value as a tensor; an error when this program was not made for it."""
        tensor = _as_tensor(self.name, value)
        if tensor.dtype != self.dtype:
            raise ConfigError(
                f"feed {self.name!r}: got {tensor.dtype}, expected {self.dtype}; convert it, since "
                "a program computes with the types it was captured with"
            )
        fits = tensor.dim() == len(self.shape) and all(
            wanted in (None, size) for size, wanted in zip(tensor.shape, self.shape, strict=True)
        )
        if not fits:
            raise ConfigError(
                f"feed {self.name!r}: got the shape {list(tensor.shape)}, expected "
                f"[{', '.join('any' if size is None else str(size) for size in self.shape)}]"
            )
        return tensor


def accept(feeds: Mapping[str, Feed], given: Mapping[str, Any]) -> list[Tensor]:
    """All that was given, in the order of the program; nothing may be missing or left over."""
    missing = [name for name in feeds if name not in given]
    if missing:
        raise ConfigError(
            f"feed {missing[0]!r} is missing: the program takes {_listed(feeds)}, got "
            f"{', '.join(map(repr, given)) or 'nothing'}"
        )
    for name in given:
        if name not in feeds:
            raise ConfigError(
                f"feed {name!r} is not one of this program: {did_you_mean(name, feeds)}"
            )
    tensors = [feed.accepted(given[name]) for name, feed in feeds.items()]
    _compare(list(feeds.values()), tensors)
    return tensors


def _compare(feeds: Sequence[Feed], tensors: Sequence[Tensor]) -> None:
    """Sizes that must be the same: usually those of the batch."""
    seen: dict[str, tuple[str, int, int]] = {}
    for feed, tensor in zip(feeds, tensors, strict=True):
        for dim, tie in enumerate(feed.ties):
            if tie is None:
                continue
            size = tensor.shape[dim]
            name, where, first = seen.setdefault(tie, (feed.name, dim, size))
            if size != first:
                raise ConfigError(
                    f"feed {feed.name!r} has {size} in dimension {dim}, and feed {name!r} {first} "
                    f"in dimension {where}; expected the same"
                )


def feed_of(name: str, shape: Sequence[int | None], dtype: Any) -> Feed:
    """A feed from what a user writes: -1 is any size too, and a type may be its name."""
    sizes: list[int | None] = []
    for size in shape:
        if size is not None and (not isinstance(size, int) or size < -1 or size == 0):
            raise ConfigError(f"data {name!r}: got the size {size!r}, expected a number or None")
        sizes.append(None if size in (None, -1) else size)
    return Feed(name, tuple(sizes), _dtype(name, dtype))


def _dtype(name: str, dtype: Any) -> torch.dtype:
    found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if not isinstance(found, torch.dtype):
        raise ConfigError(
            f"data {name!r}: got dtype={dtype!r}, expected one of torch, torch.float32"
        )
    return found


def _as_tensor(name: str, value: Any) -> Tensor:
    if isinstance(value, Tensor):
        return value.detach()
    try:
        return torch.from_numpy(np.ascontiguousarray(value))
    except TypeError as error:
        raise ConfigError(
            f"feed {name!r}: got a {type(value).__name__}, expected a tensor or an array: {error}"
        ) from None


def _listed(feeds: Mapping[str, Feed]) -> str:
    return "; ".join(map(str, feeds.values())) or "no feed"
