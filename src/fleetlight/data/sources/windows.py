# SPDX-License-Identifier: Apache-2.0
"""Records in groups that are read whole: a sampler of windows, and what a data set offers."""

from __future__ import annotations

import abc
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

from torch.utils.data import DataLoader, Dataset

from fleetlight.data.order.epoch_order import EpochSampler, epoch_seed
from fleetlight.data.order.window_order import WindowOrder
from fleetlight.errors import ConfigError


class Grouped(Dataset[Any], abc.ABC):
    """A data set whose records are read in groups."""

    #: records that are shuffled together, at least
    WINDOW: ClassVar[int] = 65_536

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

    @abc.abstractmethod
    def __len__(self) -> int: ...

    @staticmethod
    @abc.abstractmethod
    def collate(rows: Any) -> Any:
        """For `DataLoader(collate_fn=...)`: a batch of what the data set gives."""

    def loader(
        self,
        batch_size: int,
        *,
        shuffle: bool = False,
        window: int | None = None,
        seed: int = 0,
        **settings: Any,
    ) -> DataLoader[Any]:
        """A DataLoader which reads each group once an epoch; `settings` are those of torch.

        `shuffle`: in a new order each epoch, of the groups and of the records in a `window` of
        groups with at least so many records. `seed`: of the order without `fleet.shard`.
        """
        for name in ("sampler", "batch_sampler"):
            if name in settings:
                raise ConfigError(
                    f"loader({name}=...): the order of files is drawn here; leave {name} out, or "
                    "make a torch DataLoader of this data set, which reads groups again and again"
                )
        sampler = WindowSampler(
            self,
            shuffle=shuffle,
            window=self.WINDOW if window is None else window,
            seed=seed,
            # loading processes do not see what this one has loaded
            reads_ahead=not settings.get("num_workers"),
        )
        return DataLoader(
            self, batch_size, sampler=sampler, **{"collate_fn": self.collate, **settings}
        )


class WindowSampler(EpochSampler):
    """The records window by window; alone it draws a new order for each iteration."""

    def __init__(
        self, records: Grouped, *, shuffle: bool, window: int, seed: int, reads_ahead: bool
    ) -> None:
        if window < 1:
            raise ConfigError(f"loader: got window={window}, expected at least 1 record")
        self.records, self._shuffle, self._window, self._seed = records, shuffle, window, seed
        self._reads_ahead = reads_ahead
        self._epoch = 0
        kind = "shuffled" if shuffle else "in sequence"
        self._order_name = f"{records.fingerprint}, {kind} in windows of {window}"

    def __len__(self) -> int:
        return sum(self.records.group_rows)

    def __iter__(self) -> Iterator[int]:
        order = self.order(self._seed, self._epoch)
        self._epoch += 1
        for number, window in enumerate(order.windows):
            self.will_read(order, number, number + 1)
            yield from order[window.start : window.stop]

    def set_epoch(self, epoch: int) -> None:
        """Draw the order of this epoch at the next iteration."""
        self._epoch = epoch

    @property
    def order_name(self) -> str:
        return self._order_name

    def order(self, seed: int, epoch: int) -> WindowOrder:
        drawn = epoch_seed(seed, epoch) if self._shuffle else None
        return WindowOrder(self.records.group_rows, seed=drawn, rows=self._window)

    def will_read(self, order: WindowOrder, *numbers: int) -> None:
        """Let the data set load these windows, in this order."""
        if self._reads_ahead:
            for number in numbers:
                for window in order.windows[number : number + 1]:
                    self.records.will_read(window.groups)

    def settings(self) -> dict[str, object]:
        return {
            "records": len(self),
            "shuffle": self._shuffle,
            "window": self._window,
            "files": self.records.fingerprint,
        }
