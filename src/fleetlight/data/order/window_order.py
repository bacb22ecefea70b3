# SPDX-License-Identifier: Apache-2.0
"""`WindowOrder`: an order of records in groups, in which near records are near on disk. Pure.

A window is some groups after one another, at least `rows` records of them. Shuffling draws an order
of all groups, cuts it into windows, and draws an order of the records of each window.
"""

from __future__ import annotations

import bisect
import itertools
from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple, overload

import numpy as np
import torch

from fleetlight.data.order.blocks import Interval
from fleetlight.kernels.arrays import Ids

#: orders of windows that are kept; a worker reads one window after another
_KEPT = 4


class Window(NamedTuple):
    """Groups that are read together, and their positions in the order."""

    groups: tuple[int, ...]
    start: int
    stop: int


class WindowOrder(Sequence[int]):
    """The records of an epoch by number; numbers count the records of all groups in turn."""

    def __init__(self, group_rows: Sequence[int], *, seed: int | None, rows: int) -> None:
        """Make the order; `seed`: None keeps the order of the files."""
        self._key = (tuple(group_rows), seed, rows)
        self._seed = seed
        #: the first record of each group
        self._firsts = [0, *itertools.accumulate(group_rows)]
        self.windows = list(_windows(group_rows, _shuffled(len(group_rows), seed), rows))
        self._starts = [window.start for window in self.windows]
        self._orders: OrderedDict[int, Ids] = OrderedDict()

    def __len__(self) -> int:
        return self._firsts[-1]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, WindowOrder) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    @overload
    def __getitem__(self, place: int) -> int: ...
    @overload
    def __getitem__(self, place: slice) -> list[int]: ...
    def __getitem__(self, place: int | slice) -> int | list[int]:
        if isinstance(place, slice):
            start, stop, step = place.indices(len(self))
            records: list[int] = self.records(start, max(start, stop)).tolist()
            return records[::step]
        at = place + len(self) if place < 0 else place
        if not 0 <= at < len(self):
            raise IndexError(f"got position {place}, expected one of {len(self)}")
        return int(self.records(at, at + 1)[0])

    def records(self, start: int, stop: int) -> Ids:
        """The records from one position to another."""
        parts = []
        for number, low, high in self.pieces(start, stop):
            first = self.windows[number].start
            parts.append(self._order_of(number)[low - first : high - first])
        return parts[0] if len(parts) == 1 else np.concatenate([np.empty(0, np.int64), *parts])

    def pieces(self, start: int, stop: int) -> list[tuple[int, int, int]]:
        """These positions, cut where windows begin: the window of each piece, start and stop."""
        found = []
        number = self.window_at(start)
        while start < stop:
            end = min(stop, self.windows[number].stop)
            found.append((number, start, end))
            number, start = number + 1, end
        return found

    def window_at(self, place: int) -> int:
        """The window of a position."""
        return bisect.bisect_right(self._starts, place) - 1

    def cut(self, intervals: Sequence[Interval]) -> list[Interval]:
        """Intervals of positions, none of which is in two windows."""
        return [(low, high) for one in intervals for _, low, high in self.pieces(*one)]

    def _order_of(self, number: int) -> Ids:
        if number in self._orders:
            self._orders.move_to_end(number)
            return self._orders[number]
        window = self.windows[number]
        records = np.concatenate(
            [np.arange(self._firsts[group], self._firsts[group + 1]) for group in window.groups]
        )
        if self._seed is not None:
            records = records[_permutation(len(records), self._seed + 1 + number)]
        self._orders[number] = records
        if len(self._orders) > _KEPT:
            self._orders.popitem(last=False)
        return records


def _windows(rows: Sequence[int], groups: Sequence[int], least: int) -> list[Window]:
    found: list[Window] = []
    own: list[int] = []
    start = stop = 0
    for group in groups:
        if not rows[group]:
            continue
        own.append(group)
        stop += rows[group]
        if stop - start >= least:
            found.append(Window(tuple(own), start, stop))
            start, own = stop, []
    if own:
        found.append(Window(tuple(own), start, stop))
    return found


def _shuffled(groups: int, seed: int | None) -> Sequence[int]:
    if seed is None:
        return range(groups)
    order: list[int] = _permutation(groups, seed).tolist()
    return order


def _permutation(count: int, seed: int) -> Ids:
    generator = torch.Generator().manual_seed(seed % 2**63)
    drawn: Ids = torch.randperm(count, generator=generator).numpy()
    return drawn
