# SPDX-License-Identifier: Apache-2.0
"""Feeds: the named inputs of each run, and their checks."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fleetlight.errors import ConfigError, did_you_mean
from fleetlight.static.graph.variable import is_variable

#: the usual types of feeds
_USUAL = ("float32", "float64", "bfloat16", "int64", "int32", "bool")
#: sizes of a tensor; None is a dynamic size
Shape = tuple[int | None, ...]


@dataclasses.dataclass(frozen=True)
class Limit:
    """The values of a dynamic size for which a program is valid."""

    least: int = 0
    most: int | None = None
    never: frozenset[int] = frozenset()

    def within(self, other: Limit) -> Limit:
        """The intersection of two limits."""
        most = [limit.most for limit in (self, other) if limit.most is not None]
        least = max(self.least, other.least)
        never = {size for size in self.never | other.never if size >= least}
        return Limit(least, min(most, default=None), frozenset(never))

    def allows(self, size: int) -> bool:
        """Whether a size may be fed."""
        is_below = self.most is None or size <= self.most
        return self.least <= size and is_below and size not in self.never

    def __str__(self) -> str:
        said = [f"at least {self.least}"] if self.least else []
        said += [f"at most {self.most}"] if self.most is not None else []
        said += [f"other than {', '.join(map(str, sorted(self.never)))}"] if self.never else []
        return " and ".join(said) or "any"


#: a limit that allows every size
FREE = Limit()


@dataclasses.dataclass(frozen=True)
class Feed:
    """An input of a program."""

    name: str
    shape: Shape
    dtype: torch.dtype
    #: sizes of the same name must be equal, in all feeds of a program
    ties: tuple[str | None, ...] = ()
    #: the limit of each size
    limits: tuple[Limit, ...] = ()

    def __str__(self) -> str:
        sizes = ", ".join("?" if size is None else str(size) for size in self.shape)
        return f"{self.name}: {str(self.dtype).removeprefix('torch.')}[{sizes}]"

    def accepted(self, value: Any, device: torch.device | None = None) -> Tensor:
        """The value as a tensor; an error if the program is not valid for it."""
        tensor = value if type(value) is Tensor else _as_tensor(self, value)
        if tensor.requires_grad:
            tensor = tensor.detach()
        if tensor.dtype != self.dtype:
            raise ConfigError(
                f"feed {self.name!r}: got {tensor.dtype}, expected {self.dtype}; convert it, since "
                "a program keeps the types of its capture"
            )
        if not self._fits(tensor.shape):
            tensor = self._with_or_without_last(tensor)
        if not self._fits(tensor.shape):
            raise ConfigError(
                f"feed {self.name!r}: got the shape {list(tensor.shape)}, expected "
                f"[{', '.join('any' if size is None else str(size) for size in self.shape)}]"
            )
        for dim, limit in self._limited:
            if not limit.allows(tensor.shape[dim]):
                raise ConfigError(
                    f"feed {self.name!r}: got {tensor.shape[dim]} in dimension {dim}, expected "
                    f"{limit}: the program branched on this size when it was written"
                )
        if device is not None and tensor.device != device:
            tensor = tensor.to(device, non_blocking=True)
        # the program was captured with contiguous inputs
        return tensor.contiguous()

    def _fits(self, shape: torch.Size) -> bool:
        if len(shape) != len(self.shape):
            return False
        return all(shape[dim] == size for dim, size in self._fixed)

    def _with_or_without_last(self, tensor: Tensor) -> Tensor:
        """Add or remove a last dimension of 1: labels may be `[N]` or `[N, 1]`."""
        if self.shape[-1:] == (1,) and tensor.dim() == len(self.shape) - 1:
            return tensor.unsqueeze(-1)
        if tensor.shape[-1:] == (1,) and tensor.dim() == len(self.shape) + 1:
            return tensor.squeeze(-1)
        return tensor

    @functools.cached_property
    def _fixed(self) -> list[tuple[int, int]]:
        return [(dim, size) for dim, size in enumerate(self.shape) if size is not None]

    @functools.cached_property
    def _limited(self) -> list[tuple[int, Limit]]:
        return [(dim, limit) for dim, limit in enumerate(self.limits) if limit != FREE]

    @functools.cached_property
    def tied(self) -> list[tuple[int, str]]:
        """The dimensions that must equal others, with the name of their size."""
        return [(dim, tie) for dim, tie in enumerate(self.ties) if tie is not None]

    def stand_in(self, sizes: Mapping[str, int], device: torch.device | None) -> Tensor:
        """A placeholder for a feed that the run does not need; `sizes` has the known sizes."""
        shape = [
            size if size is not None else sizes.get(tie or "", 1)
            for size, tie in zip(self.shape, self.ties or [None] * len(self.shape), strict=True)
        ]
        return torch.zeros((), dtype=self.dtype, device=device).expand(shape)


def accept(
    feeds: Mapping[str, Feed],
    given: Mapping[str, Any],
    needed: Collection[str] | None = None,
    device: torch.device | None = None,
) -> list[Tensor]:
    """The given feeds in the order of the program; an error for missing or unknown ones.

    Only `needed` feeds must be given, if that is not None.
    """
    if not isinstance(given, Mapping):
        raise ConfigError(
            f"feed: got a {type(given).__name__}, expected a dict of {_listed(feeds)}, or as many "
            "tensors in this order"
        )
    if given.keys() != feeds.keys():
        _check_names(feeds, given, feeds if needed is None else needed)
    found = {name: feeds[name].accepted(value, device) for name, value in given.items()}
    sizes = _compare(feeds, found)
    return [
        found[name] if name in found else feed.stand_in(sizes, device)
        for name, feed in feeds.items()
    ]


def _check_names(
    feeds: Mapping[str, Feed], given: Mapping[str, Any], needed: Collection[str]
) -> None:
    missing = [name for name in needed if name not in given]
    if missing:
        raise ConfigError(
            f"feed {missing[0]!r} is missing: the program takes {_listed(feeds)}, got "
            f"{', '.join(map(repr, given)) or 'nothing'}"
        )
    for name in given:
        if name not in feeds:
            raise ConfigError(
                f"feed {name!r} is not one of this program: {did_you_mean(str(name), feeds)}"
            )


def in_order(feeds: Mapping[str, Feed], values: Any) -> Mapping[str, Any]:
    """What a user gives as feed: by names, or as a list in the order of the program."""
    if isinstance(values, (list, tuple)):
        if len(values) == 1 and isinstance(values[0], Mapping):
            # of loaders that serve several devices, there is one
            return values[0]
        if len(values) != len(feeds):
            raise ConfigError(
                f"feed: got {len(values)} values, expected {len(feeds)}: {_listed(feeds)}"
            )
        return dict(zip(feeds, values, strict=True))
    if isinstance(values, Tensor) and len(feeds) == 1:
        return {next(iter(feeds)): values}
    return values  # type: ignore[no-any-return]


def _compare(feeds: Mapping[str, Feed], found: Mapping[str, Tensor]) -> dict[str, int]:
    """Sizes that must be the same, usually those of the batch, by their names."""
    sizes: dict[str, int] = {}
    origins: dict[str, tuple[str, int]] = {}
    for name, feed in feeds.items():
        for dim, tie in feed.tied if name in found else ():
            size = found[name].shape[dim]
            if tie not in sizes:
                sizes[tie], origins[tie] = size, (name, dim)
            elif size != sizes[tie]:
                first, where = origins[tie]
                raise ConfigError(
                    f"feed {name!r} has {size} in dimension {dim}, and feed {first!r} {sizes[tie]} "
                    f"in dimension {where}; expected the same"
                )
    return sizes


def feed_of(name: str, shape: Sequence[int | None], dtype: Any) -> Feed:
    """A feed from what a user writes: -1 is any size too, and a type may be its name."""
    if not isinstance(shape, Sequence) or isinstance(shape, str):
        raise ConfigError(
            f"data {name!r}: got the shape {shape!r}, expected a list of sizes, in which None is "
            f"any size: [None, 4]"
        )
    sizes: list[int | None] = []
    for size in shape:
        if size is not None and (not isinstance(size, int) or size < -1 or size == 0):
            raise ConfigError(f"data {name!r}: got the size {size!r}, expected a number or None")
        sizes.append(None if size in (None, -1) else size)
    return Feed(name, tuple(sizes), _dtype(name, dtype))


def _dtype(name: str, dtype: Any) -> torch.dtype:
    found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if not isinstance(found, torch.dtype):
        known = [key for key, value in vars(torch).items() if isinstance(value, torch.dtype)]
        near = f"; {did_you_mean(dtype, known, _USUAL)}" if isinstance(dtype, str) else ""
        raise ConfigError(
            f"data {name!r}: got dtype={dtype!r}, expected one of torch, torch.float32{near}"
        )
    return found


def _as_tensor(feed: Feed, value: Any) -> Tensor:
    if isinstance(value, Tensor):
        if is_variable(value):
            raise ConfigError(
                f"feed {feed.name!r}: got {value!r}, which has no values; feed a tensor or an array"
            )
        return value.detach() if value.requires_grad else value
    try:
        array = np.asarray(value, order="C")
        if not isinstance(value, (np.ndarray, np.generic)):
            array = _typed(array, feed.dtype)
        return torch.from_numpy(array if array.flags.writeable else array.copy())
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"feed {feed.name!r}: got a {type(value).__name__}, expected a tensor or an array: "
            f"{error}"
        ) from None


def _typed(array: NDArray[Any], dtype: torch.dtype) -> NDArray[Any]:
    """Python's numbers have no size: they take that of the feed, where they are of its kind."""
    fitting = "iuf" if dtype.is_floating_point else "iu"
    if dtype in (torch.bool, torch.bfloat16) or array.dtype.kind not in fitting or not array.size:
        return array
    return array.astype(torch.empty(0, dtype=dtype).numpy().dtype)


def _listed(feeds: Mapping[str, Feed]) -> str:
    return "; ".join(map(str, feeds.values())) or "no feed"
