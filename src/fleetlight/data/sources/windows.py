# SPDX-License-Identifier: Apache-2.0
"""Records in groups that are read whole: a sampler of windows, and what a data set offers."""

from __future__ import annotations

import abc
from collections.abc import Iterator, Sequence

from fleetlight.data.order.epoch_order import EpochSampler, epoch_seed
from fleetlight.data.order.window_order import WindowOrder
from fleetlight.errors import ConfigError

#: records that are shuffled together, at least
WINDOW = 65_536


class Grouped(abc.ABC):
    """A data set whose records are read in groups."""

    @property
    @abc.abstractmethod
    def group_rows(self) -> Sequence[int]:
        """How many records each group has."""

    @property
    @abc.abstractmethod
    def fingerprint(self) -> str:
        """A text that changes with the files."""

    @abc.abstractmethod
    def will_read(self, groups: Sequence[int]) -> None:
        """Begin to load groups that are needed soon."""


class WindowSampler(EpochSampler):
    """The records window by window; alone it draws a new order for each iteration."""

    def __init__(self, records: Grouped, *, shuffle: bool, window: int = WINDOW, seed: int = 0):
        if window < 1:
            raise ConfigError(f"loader: got window={window}, expected at least 1 record")
        self.records, self._shuffle, self._window, self._seed = records, shuffle, window, seed
        self._epoch = 0

    def __len__(self) -> int:
        return sum(self.records.group_rows)

    def __iter__(self) -> Iterator[int]:
        order = self.order(self._seed, self._epoch)
        self._epoch += 1
        for number, window in enumerate(order.windows):
            self.records.will_read(window.groups)
            for following in order.windows[number + 1 : number + 2]:
                self.records.will_read(following.groups)
            yield from order[window.start : window.stop]

    def set_epoch(self, epoch: int) -> None:
        """Draw the order of this epoch at the next iteration."""
        self._epoch = epoch

    def order(self, seed: int, epoch: int) -> WindowOrder:
        drawn = epoch_seed(seed, epoch) if self._shuffle else None
        return WindowOrder(self.records.group_rows, seed=drawn, rows=self._window)

    def settings(self) -> dict[str, object]:
        return {
            "records": len(self),
            "shuffle": self._shuffle,
            "window": self._window,
            "files": self.records.fingerprint,
        }
