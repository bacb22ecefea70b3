# SPDX-License-Identifier: Apache-2.0
"""Samplers on both sides of a shard: the user's for all workers, and torch's for this one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch.utils.data import Sampler

from fleetlight.data.order.epoch_order import EpochSampler, order_name, order_of
from fleetlight.observe.log import logger


class SharedSampler:
    """The user's sampler, which must give all workers the same order."""

    def __init__(self, sampler: Any, workers: int) -> None:
        self._sampler = sampler
        self._is_checked = workers == 1

    def __len__(self) -> int:
        return len(self._sampler)

    def order(self, seed: int, epoch: int) -> Sequence[Any]:
        """All that it yields in an epoch: indices, or batches of them."""
        order = order_of(self._sampler, seed, epoch)
        if not self._is_checked:
            self._is_checked = True
            self._check_repeats(order, seed, epoch)
        return order

    @property
    def order_name(self) -> str:
        """What its order depends on, besides the seed and the epoch."""
        return order_name(self._sampler)

    def settings(self) -> dict[str, object]:
        """Settings that must be the same on all workers."""
        if isinstance(self._sampler, EpochSampler):
            return self._sampler.settings()
        return {"records": length_of(self._sampler), "sampler": type(self._sampler).__name__}

    def _check_repeats(self, order: Sequence[Any], seed: int, epoch: int) -> None:
        if order_of(self._sampler, seed, epoch) != order:
            logger.warning(
                "fleet.shard: %s gives a different order each time it is iterated, whatever the "
                "seed: two workers may read the same records, and resuming is not exact; let it "
                "draw from torch's generator, or give it set_epoch(epoch)",
                type(self._sampler).__name__,
            )


class ShardBatches(Sampler[Any]):
    """The batch sampler given to torch: the rest of the current epoch, for this worker."""

    def __init__(self) -> None:
        self.now: Iterable[Any] = ()

    def __iter__(self) -> Iterator[Any]:
        return iter(self.now)


def length_of(records: Any) -> int | None:
    """The number of records, None where it is unknown."""
    try:
        return len(records)
    except (TypeError, NotImplementedError):
        return None
