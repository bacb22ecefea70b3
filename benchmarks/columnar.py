# SPDX-License-Identifier: Apache-2.0
"""Parquet files of a click log: batches from `fleet.data.parquet`, against Arrow's own scan.

One process. The variants take turns, an epoch each. CPU seconds count, since a thread decodes the
next row groups. `rows` is a torch data set over the same records in memory, one at a time.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch.utils.data import DataLoader, Dataset

import fleetlight as fleet
from benchmarks import report
from fleetlight.data import ShardLoader

CLAIM = (
    "26 columns of ids and 13 of numbers: at least 0.8 times the records per CPU second of Arrow's "
    "scan of the same columns, and 3 times those of a torch DataLoader over rows in memory."
)
SCAN, IN_TURN, SHUFFLED, ROWS = "Arrow's scan", "in turn", "shuffled", "rows"
BARS = {SCAN: 0.8, ROWS: 3.0}
NUMBERS, CATEGORIES, GROUP = 13, 26, 100_000
COLUMNS = {
    "ids": [f"C{n}" for n in range(CATEGORIES)],
    "dense": [f"I{n}" for n in range(NUMBERS)],
    "label": "label",
}


def write(folder: Path, records: int) -> None:
    """Two files, with row groups of 100,000 records."""
    random = np.random.default_rng(0)
    for number in range(2):
        size = records // 2
        table: dict[str, Any] = {
            name: random.zipf(1.2, size) % 1_000_003 for name in COLUMNS["ids"]
        }
        table |= {name: random.random(size, np.float32) for name in COLUMNS["dense"]}
        table["label"] = random.integers(0, 2, size).astype(np.float32)
        pq.write_table(pa.table(table), folder / f"{number}.parquet", row_group_size=GROUP)


class Rows(Dataset[Any]):
    """The records in memory, one at a time."""

    def __init__(self, folder: Path) -> None:
        table = pq.read_table(sorted(folder.iterdir())[0])
        self._ids, self._dense = (
            np.stack([table.column(name).to_numpy() for name in COLUMNS[part]], 1)
            for part in ("ids", "dense")
        )
        self._label = table.column("label").to_numpy()

    def __len__(self) -> int:
        return GROUP

    def __getitem__(self, index: int) -> Any:
        return self._ids[index], self._dense[index], self._label[index]


def scan(folder: Path) -> int:
    """Decode all columns, without making batches."""
    records = 0
    for path in sorted(folder.iterdir()):
        with pq.ParquetFile(path, pre_buffer=True) as file:
            for group in range(file.num_row_groups):
                records += file.read_row_group(group, use_threads=False).num_rows
    return records


def variants(folder: Path, batch: int) -> dict[str, Callable[[], int]]:
    """By name: a function that reads an epoch, and returns how many records it had."""
    clicks, rows = fleet.data.parquet(folder, COLUMNS), DataLoader(Rows(folder), batch)
    loaders: dict[str, ShardLoader[Any]] = {
        name: ShardLoader(loader, worker=0, workers=1, seed=0, tail="join")
        for name, loader in (
            (IN_TURN, clicks.loader(batch)),
            (SHUFFLED, clicks.loader(batch, shuffle=True)),
        )
    }
    return {
        SCAN: partial(scan, folder),
        **{name: partial(_records, one) for name, one in loaders.items()},
        ROWS: lambda: sum(len(label) for _, _, label in rows),
    }


def _records(loader: Any) -> int:
    return sum(len(one["label"]) for one in loader)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and write the result page."""
    options = _parse(argv)
    torch.set_num_threads(1)
    sections = []
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        write(folder, options.records)
        for batch in (1024, 4096):
            reads = variants(folder, batch)
            for read in reads.values():
                read()  # to compile, and to fill the page cache
            rates: dict[str, list[float]] = {name: [] for name in reads}
            for _ in range(options.rounds):
                for name, read in reads.items():
                    began = time.process_time()
                    records = read()
                    rates[name].append(records / (time.process_time() - began))
            sections.append(_section(batch, rates))
    report.page("columnar", CLAIM, sections, keep=options.write)
    return 0


def _section(batch: int, rates: dict[str, list[float]]) -> str:
    rows = []
    for name, own in rates.items():
        cells = [name, str(report.Spread.of([rate / 1e6 for rate in own]))]
        for base, bar in BARS.items():
            ratio = report.Spread.of([a / b for a, b in zip(own, rates[base], strict=True)])
            met = "met" if ratio.median >= bar else "missed"
            cells.append(f"{ratio} ({bar}: {met})" if name == IN_TURN else str(ratio))
        rows.append(tuple(cells))
    head = (
        "variant",
        "million records per CPU second: median (min..max)",
        *map("over {}".format, BARS),
    )
    return f"## Batches of {batch}\n\n{report.table(head, rows)}\n\nRounds: {len(rates[SCAN])}."


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=CLAIM)
    parser.add_argument("--records", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--no-write", dest="write", action="store_false")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
