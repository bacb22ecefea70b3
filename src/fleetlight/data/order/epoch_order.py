# SPDX-License-Identifier: Apache-2.0
"""The order that a sampler gives an epoch, the same on every worker."""

from __future__ import annotations

import abc
from array import array
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import RandomSampler, Sampler, SequentialSampler

from fleetlight.data.order.seeded_rng import SeededRng


class EpochSampler(Sampler[int], abc.ABC):
    """A sampler that knows the order of any epoch, and need not make all of it."""

    @abc.abstractmethod
    def order(self, seed: int, epoch: int) -> Sequence[int]:
        """The order of an epoch; equal for an equal seed."""

    @property
    @abc.abstractmethod
    def order_name(self) -> str:
        """What the order depends on, besides the seed and the epoch."""

    @abc.abstractmethod
    def settings(self) -> dict[str, object]:
        """Settings that must be the same on all workers."""


def epoch_seed(seed: int, epoch: int) -> int:
    """The seed of the random numbers of one epoch."""
    return (seed * 1_000_003 + epoch) % 2**63


def order_of(sampler: Any, seed: int, epoch: int) -> Sequence[Any]:
    """All that a sampler yields in an epoch: indices, or batches of them."""
    if isinstance(sampler, EpochSampler):
        return sampler.order(seed, epoch)
    if type(sampler) is SequentialSampler:
        return range(len(sampler))
    if _is_random(sampler) and _is_permutation(sampler):
        generator = torch.Generator().manual_seed(epoch_seed(seed, epoch))
        permutation = torch.randperm(len(sampler), generator=generator)
        # 8 bytes for each record; a list would take 40
        return array("q", permutation.numpy().tobytes())
    return _drawn(sampler, seed, epoch)


def order_name(sampler: Any) -> str:
    """What the order of a sampler depends on, besides the seed and the epoch, as far as known."""
    if isinstance(sampler, EpochSampler):
        return sampler.order_name
    if type(sampler) is SequentialSampler:
        return "in sequence"
    if _is_random(sampler) and _is_permutation(sampler):
        return f"{len(sampler)} records, shuffled"
    return " of ".join(map(_layer_name, _layers(sampler)))


def _layer_name(sampler: Any) -> str:
    """The kind of a sampler; with the size of its batches, or with its length if it is torch's."""
    name = type(sampler).__name__
    if hasattr(sampler, "sampler"):
        return f"{name}(batch_size={getattr(sampler, 'batch_size', None)})"
    # the length of any other sampler may differ from epoch to epoch
    is_torchs = type(sampler).__module__.startswith("torch.utils.data.")
    return f"{name}({len(sampler)} records)" if is_torchs else name


def _is_random(sampler: Any) -> bool:
    """True for torch's sampler, and the one that torchdata's StatefulDataLoader makes for it."""
    kind = type(sampler)
    its = kind.__module__.startswith("torchdata.") and kind.__name__ == "RandomSampler"
    return kind is RandomSampler or its


def _is_permutation(sampler: Any) -> bool:
    return not sampler.replacement and len(sampler) == len(sampler.data_source)


def _drawn(sampler: Any, seed: int, epoch: int) -> list[Any]:
    """All that any other sampler yields, with each generator it uses seeded for the epoch."""
    start = epoch_seed(seed, epoch)
    layers = list(_layers(sampler))
    own = {id(g): g for g in (getattr(layer, "generator", None) for layer in layers)}
    generators = [g for g in own.values() if isinstance(g, torch.Generator)]
    before = [generator.get_state() for generator in generators]
    for layer in layers:
        if hasattr(layer, "set_epoch"):
            layer.set_epoch(epoch)
    for generator in generators:
        generator.manual_seed(start)
    try:
        with SeededRng(start):
            return [_plain(entry) for entry in sampler]
    finally:
        for generator, state in zip(generators, before, strict=True):
            generator.set_state(state)


def _layers(sampler: Any) -> Iterator[Any]:
    """A sampler, and those that it wraps."""
    while sampler is not None:
        yield sampler
        sampler = getattr(sampler, "sampler", None)


def _plain(entry: Any) -> Any:
    """An index or a batch of indices, without tensors and arrays."""
    return entry.tolist() if hasattr(entry, "tolist") else entry
