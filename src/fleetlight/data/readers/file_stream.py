# SPDX-License-Identifier: Apache-2.0
"""`FileStream`: records from text files that are larger than memory, line by line."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from fleetlight.data.random_bits import key_of
from fleetlight.data.readers.lines import Line, Paths, chunks, existing, lines_of, located
from fleetlight.errors import ConfigError

T = TypeVar("T")

#: consecutive lines that one loading process takes
_STRETCH = 1_024


class FileStream(IterableDataset[Line], Generic[T]):
    r"""Streams the lines of files, plain or gzip; each batch is parsed where it is used.

    Under `fleet.shard` every worker reads all lines, which is cheap, and parses only its own.
    `parse` takes a list of lines (bytes) and returns a batch, as `Criteo.parse` does. Where it
    fails, the error names the file and the line.

    Args:
        files: a file, a pattern, or a list of these.
        parse: makes a batch of a list of lines.
        header: lines at the top of each file that are not records.
        shuffle: shuffles the files, and this many lines at a time, in a new order each epoch.
        seed: the seed of the order.

    Raises:
        ConfigError: an argument is negative.
        DataError: a file does not exist.

    Example:
        >>> from pathlib import Path
        >>> _ = Path("numbers.txt").write_text("1 2\n3 4\n")
        >>> def parse(lines):
        ...     return torch.tensor([[float(word) for word in line.split()] for line in lines])
        >>> next(iter(fleet.data.FileStream("numbers.txt", parse).loader(2)))
        tensor([[1., 2.],
                [3., 4.]])
    """

    def __init__(
        self,
        files: Paths,
        parse: Callable[[list[bytes]], T],
        *,
        header: int = 0,
        shuffle: int = 0,
        seed: int = 0,
    ) -> None:
        """Make a stream.

        `header`: lines at the top of each file that are not records. `shuffle`: shuffle the files,
        and this many lines at a time, in a new order each epoch.
        """
        if header < 0 or shuffle < 0:
            raise ConfigError(f"FileStream: got {header=}, {shuffle=}; expected 0 or more")
        self.files = existing(files)
        self._parse, self._header = parse, header
        self._shuffle, self._seed = shuffle, seed
        # in shared memory: loading processes may outlive an epoch
        self._epoch = torch.zeros(1, dtype=torch.int64)
        self._epoch.share_memory_()  # type: ignore[no-untyped-call]

    @property
    def order_name(self) -> str:
        """What the order depends on, besides the epoch; positions of `fleet.shard` have it."""
        if not self._shuffle:
            return "in sequence"
        return f"shuffled in windows of {self._shuffle} lines with seed {self._seed}"

    def set_epoch(self, epoch: int) -> None:
        """Shuffle in the order of this epoch; `fleet.shard` calls it."""
        self._epoch[0] = epoch

    def __iter__(self) -> Iterator[Line]:
        lines = self._shuffled() if self._shuffle else self._in_order(self.files)
        info = get_worker_info()
        if info is None:
            return lines
        return _stretches(lines, info.id, info.num_workers)

    def collate(self, lines: Sequence[Line]) -> T:
        """For `DataLoader(collate_fn=...)`: these lines as a batch."""
        return located(self._parse, lines)

    def loader(self, batch_size: int, **settings: Any) -> DataLoader[Any]:
        """A DataLoader over batches of lines."""
        return DataLoader(self, batch_size, collate_fn=self.collate, **settings)

    def _in_order(self, files: Sequence[str]) -> Iterator[Line]:
        return itertools.chain.from_iterable(lines_of(file, self._header) for file in files)

    def _shuffled(self) -> Iterator[Line]:
        # the same order in all loading processes: each takes its stretches of it
        rng = np.random.default_rng(int(key_of(self._seed, int(self._epoch))))
        files = [self.files[place] for place in rng.permutation(len(self.files))]
        for window in chunks(self._in_order(files), self._shuffle):
            yield from (window[place] for place in rng.permutation(len(window)).tolist())


def _stretches(lines: Iterator[Line], process: int, processes: int) -> Iterator[Line]:
    """The lines of one loading process: every `processes`-th stretch."""
    for number, stretch in enumerate(chunks(lines, _STRETCH)):
        if number % processes == process:
            yield from stretch
