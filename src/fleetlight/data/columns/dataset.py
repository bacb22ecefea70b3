# SPDX-License-Identifier: Apache-2.0
"""`ColumnFiles`: a data set over columnar files."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from torch.utils.data import default_collate

from fleetlight.data.columns.decoding import Column, Decoder, Ragged, joined
from fleetlight.data.columns.groups import Groups
from fleetlight.data.columns.layout import Columns, check_known, check_together, outputs_of
from fleetlight.data.sources.loaded_groups import LoadedGroups
from fleetlight.data.sources.windows import Grouped
from fleetlight.kernels.arrays import Ids
from fleetlight.kernels.columns import follow_each_other

#: the entries of a batch, or of one record, by name
Batch = dict[str, Any]


class ColumnFiles(Grouped):
    r"""Records of columnar files, as dicts of tensors. `loader` makes batches of them.

    Whole numbers are int64, floats float32; texts are int64 ids, hashed with the name of their
    column. Lists are `Ragged`: values and the start of each list.

    Args:
        groups: the files; `parquet`, `arrow` and `csv` make them.
        columns: the columns to read, as in `parquet`.
        fill: what stands for a missing value, by column.
        transform: called with each batch.

    Raises:
        ConfigError: a column does not exist, or columns do not fit together.

    Example:
        >>> from pathlib import Path
        >>> _ = Path("clicks.csv").write_text("user,label\n7,1\n9,0\n")
        >>> clicks = fleet.data.csv("clicks.csv")
        >>> clicks
        <clicks.csv: 2 records>
        >>> clicks[1]
        {'user': tensor(9), 'label': tensor(0)}
    """

    def __init__(
        self,
        groups: Groups,
        columns: Columns,
        *,
        fill: Mapping[str, Any] | None = None,
        transform: Callable[[Batch], Any] | None = None,
    ) -> None:
        self._groups, self._transform = groups, transform
        self._outputs = outputs_of(columns, groups.columns, groups.groups_name)
        self._columns = list(dict.fromkeys(itertools.chain(*(o.columns for o in self._outputs))))
        kinds = groups.kinds(self._columns)
        for output in self._outputs:
            check_together(output, kinds)
        for name in fill or ():
            check_known(name, self._columns, "fill")
        self._decoder = Decoder(self._outputs, kinds, fill or {})
        self._rows = [group.rows for group in groups.groups]
        self._firsts = [0, *itertools.accumulate(self._rows)]
        self._fingerprint = groups.fingerprint()
        self._decoded = LoadedGroups(self._load)

    # -- the data set

    def __len__(self) -> int:
        return self._firsts[-1]

    def __getitem__(self, index: int) -> Any:
        if not -len(self) <= index < len(self):
            raise IndexError(f"{self!r}: got record {index}, expected one of {len(self)}")
        return _first(self.batch([index % len(self)]))

    def __getitems__(self, indices: Sequence[int] | Ids) -> Whole:
        """A whole batch, as DataLoader requests it."""
        return Whole(self.batch(indices))

    def batch(self, indices: Sequence[int] | Ids) -> Any:
        """These records as one batch."""
        found = self._batch(np.asarray(indices, np.int64))
        return found if self._transform is None else self._transform(found)

    @staticmethod
    def collate(rows: Any) -> Any:
        """For `DataLoader(collate_fn=...)`: keeps a batch that was made whole."""
        return rows.batch if isinstance(rows, Whole) else default_collate(rows)

    def __repr__(self) -> str:
        return f"<{self._groups.groups_name}: {len(self)} records>"

    # -- for loaders that read windows

    @property
    def group_rows(self) -> Sequence[int]:
        return self._rows

    @property
    def fingerprint(self) -> str:
        return self._fingerprint

    def will_read(self, groups: Sequence[int]) -> None:
        self._decoded.will_read(groups)

    # --

    def _load(self, number: int) -> Mapping[str, Column]:
        group = self._groups.groups[number]
        return self._decoder.decode(self._groups.read(group, self._columns), group.place)

    def _batch(self, records: Ids) -> Batch:
        if len(records) and follow_each_other(records):
            return self._in_turn(int(records[0]), int(records[-1]) + 1)
        ends = (int(records.min()), int(records.max())) if len(records) else (0, 0)
        first, last = (bisect.bisect_right(self._firsts, end) - 1 for end in ends)
        if first == last:
            self._decoded.start_batch([first])
            return self._taken(first, records)
        groups = np.searchsorted(np.array(self._firsts[first : last + 2]), records, "right") - 1
        groups += first
        places = np.empty(len(records), np.int64)
        parts, done = [], 0
        own = np.unique(groups).tolist()
        self._decoded.start_batch(own)
        for group in own:
            mine = np.flatnonzero(groups == group)
            parts.append(self._taken(group, records[mine]))
            places[mine] = np.arange(done, done + len(mine))
            done += len(mine)
        return {name: joined([part[name] for part in parts], places) for name in parts[0]}

    def _in_turn(self, start: int, stop: int) -> Batch:
        """Records that follow each other."""
        parts = []
        firsts = self._firsts
        groups = range(bisect.bisect_right(firsts, start) - 1, bisect.bisect_left(firsts, stop))
        self._decoded.start_batch(groups)
        for group in groups:
            first, end = firsts[group], min(stop, firsts[group + 1])
            columns = self._decoded.get(group)
            parts.append(
                {name: one.slice(start - first, end - first) for name, one in columns.items()}
            )
            start = end
        if len(parts) == 1:
            return parts[0]
        return {name: joined([part[name] for part in parts]) for name in parts[0]}

    def _taken(self, group: int, records: Ids) -> Batch:
        """Records of one group."""
        rows = records - self._firsts[group]
        return {name: one.take(rows) for name, one in self._decoded.get(group).items()}


class Whole:
    """A batch that was made whole; as a sequence it has the records."""

    def __init__(self, batch: Any) -> None:
        self.batch = batch

    def __iter__(self) -> Iterator[Any]:
        return (_at(self.batch, n) for n in range(len(self)))

    def __len__(self) -> int:
        return _length(self.batch)

    def __getitem__(self, index: int) -> Any:
        return _at(self.batch, index)


def _length(batch: Any) -> int:
    one = next(iter(batch.values())) if isinstance(batch, Mapping) else batch[0]
    return len(one.offsets) if isinstance(one, Ragged) else len(one)


def _at(batch: Any, place: int) -> Any:
    if isinstance(batch, Mapping):
        return {name: _entry(one, place) for name, one in batch.items()}
    return tuple(_entry(one, place) for one in batch)


def _entry(one: Any, place: int) -> Any:
    if isinstance(one, Ragged):
        stop = one.offsets[place + 1] if place + 1 < len(one.offsets) else len(one.values)
        return one.values[one.offsets[place] : stop]
    return one[place]


def _first(batch: Any) -> Any:
    return _at(batch, 0)
