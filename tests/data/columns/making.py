# SPDX-License-Identifier: Apache-2.0
"""Columnar files for tests, and what loaders read of them."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from torch.utils.data import DataLoader

from fleetlight.data.columns.dataset import ColumnFiles
from fleetlight.data.loader import ShardLoader


def numbered(folder: Path, sizes: Sequence[int], group: int = 10) -> Path:
    """Files whose records have consecutive numbers."""
    first = 0
    for n, size in enumerate(sizes):
        table = pa.table({"number": range(first, first + size)})
        pq.write_table(table, folder / f"part-{n:03}.parquet", row_group_size=group)
        first += size
    return folder


def groups_read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A list that gets each group that is loaded from now on."""
    read: list[int] = []
    plain = ColumnFiles._load
    monkeypatch.setattr(ColumnFiles, "_load", lambda self, n: read.append(n) or plain(self, n))
    return read


def shards(loader: Any, workers: int, **settings: Any) -> list[ShardLoader[Any]]:
    """The loaders of all workers."""
    usual = {"seed": 7, "tail": "join"}
    return [
        ShardLoader(loader, worker=n, workers=workers, **{**usual, **settings})
        for n in range(workers)
    ]


def numbers(loader: DataLoader[Any], steps: int | None = None) -> Counter[int]:
    """The records that count, in the next steps of a loader."""
    read: Counter[int] = Counter()
    for step, batch in enumerate(loader, start=1):
        counted = loader.counted if isinstance(loader, ShardLoader) else len(batch["number"])
        read.update(batch["number"][:counted].tolist())
        if step == steps:
            break
    return read
