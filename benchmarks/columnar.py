# SPDX-License-Identifier: Apache-2.0
"""Parquet files of a click log: batches from `fleet.data.parquet`, against Arrow's own scan.

One process on one core. The variants take turns, an epoch each, over files larger than the
caches. CPU seconds count, since a thread decodes the next row groups. `rows` is a torch DataLoader
over the same records in memory, one at a time: less than reading rows with pandas or pyarrow costs.

Then two workers and a server train wide & deep on these files. Their share is the CPU time of the
loader: that of the script's thread in `next`, and that of the thread that decodes.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch.utils.data import DataLoader, Dataset

import fleetlight as fleet
from benchmarks import interleave, jobs, report
from benchmarks.ps import TITLES, WideDeep, sgd, stepper
from fleetlight.data import ShardLoader

CLAIM = (
    "26 columns of ids and 13 of numbers, in turn: at least 0.8 times the records per CPU second "
    "of Arrow's scan of the same columns, and 3 times those of a torch DataLoader over rows in "
    "memory. Wide & deep on two workers spends less than 15 % of their CPU time on the loader."
)
SCAN, IN_TURN, SHUFFLED, ROWS = "Arrow's scan", "in turn", "shuffled", "rows"
BARS = {SCAN: 0.8, ROWS: 3.0}
AT_MOST = 0.15
NUMBERS, CATEGORIES, GROUP, FILES = 13, 26, 100_000, 4
COLUMNS = {
    "ids": [f"C{n}" for n in range(CATEGORIES)],
    "dense": [f"I{n}" for n in range(NUMBERS)],
    "label": "label",
}
BATCHES, TRAINED, WARMUP = (1024, 4096), 512, 50

Read = Callable[[], int]


def write(folder: Path, records: int, codec: str) -> None:
    """Files with row groups of 100,000 records."""
    random = np.random.default_rng(0)
    for number in range(FILES):
        size = records // FILES
        table: dict[str, Any] = {
            name: random.zipf(1.2, size) % 1_000_003 for name in COLUMNS["ids"]
        }
        table |= {name: random.random(size, np.float32) for name in COLUMNS["dense"]}
        table["label"] = random.integers(0, 2, size).astype(np.float32)
        path = folder / f"{number}.parquet"
        pq.write_table(pa.table(table), path, row_group_size=GROUP, compression=codec)


class Rows(Dataset[Any]):
    """The first records in memory, one at a time."""

    def __init__(self, folder: Path) -> None:
        with pq.ParquetFile(min(folder.iterdir())) as file:
            table = file.read_row_group(0)
        self._ids, self._dense = (
            np.stack([table.column(name).to_numpy() for name in COLUMNS[part]], 1)
            for part in ("ids", "dense")
        )
        self._label = table.column("label").to_numpy()

    def __len__(self) -> int:
        return len(self._label)

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


def variants(folder: Path, batch: int) -> dict[str, Callable[[], Read]]:
    """By name: makes a function that reads an epoch, and returns how many records it had."""
    rows = DataLoader(Rows(folder), batch)

    def ours(**settings: Any) -> Read:
        # another data set each time: nothing is in memory from the last epoch
        loader = fleet.data.parquet(folder, COLUMNS).loader(batch, **settings)
        return partial(_records, ShardLoader(loader, worker=0, workers=1, seed=0, tail="join"))

    return {
        SCAN: lambda: partial(scan, folder),
        IN_TURN: ours,
        SHUFFLED: partial(ours, shuffle=True),
        ROWS: lambda: lambda: sum(len(label) for _, _, label in rows),
    }


def _records(loader: Any) -> int:
    return sum(len(one["label"]) for one in loader)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and write the result page."""
    parser = report.parser(__doc__, rounds=5)
    add = parser.add_argument
    add("--records", type=int, default=1_400_000)
    add("--steps", type=int, default=200, help="of each job that trains")
    add("--codecs", nargs="+", default=["snappy", "zstd"])
    add("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.quick:
        options.records, options.rounds, options.steps = 100_000, 1, 20
        options.codecs = options.codecs[:1]
    torch.set_num_threads(1)
    if options.worker is not None:
        _train(options.worker, options.steps)
        return 0
    return report.page("columnar", CLAIM, _sections(options), options.quick)


def _sections(options: argparse.Namespace) -> Iterator[str]:
    for codec in options.codecs:
        with tempfile.TemporaryDirectory() as made:
            folder = Path(made)
            write(folder, options.records, codec)
            for batch in BATCHES:
                with _on_one_core():
                    yield _read(folder, codec, batch, options.rounds)
            yield _shares(folder, codec, options)


@contextlib.contextmanager
def _on_one_core() -> Iterator[None]:
    """Keep threads that load ahead on the core of the others, so that CPU seconds compare."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


def _read(folder: Path, codec: str, batch: int, rounds: int) -> str:
    """The rates of all variants."""
    made = variants(folder, batch)
    for make in made.values():
        make()()  # to compile, and to fill the page cache

    def play(make: Callable[[], Read]) -> interleave.Share:
        read = make()
        # the last variant's groups are in reference cycles, and fresh memory is slow
        gc.collect()
        cpu, wall = time.process_time(), time.perf_counter()
        records = read()
        return records, time.process_time() - cpu, time.perf_counter() - wall

    found = [interleave.interleave({n: partial(play, m) for n, m in made.items()}, rounds, 1)]
    # by CPU seconds, not by the clock
    rates = {one.name: one for one in interleave.series(found)}
    rows = []
    for name, own in rates.items():
        cells = [name, str(report.Spread.of(rate / 1e6 for rate in own.rates))]
        for base, bar in BARS.items():
            ratio = report.Ratio(own, rates[base], bar if name == IN_TURN else None).row()
            cells.append(f"{ratio[1]} ({ratio[2]})" if name == IN_TURN else ratio[1])
        rows.append(cells)
    rate = "million records per CPU second: median (min..max)"
    table = report.table(("variant", rate, *map("over {}".format, BARS)), rows)
    megabytes = sum(path.stat().st_size for path in folder.iterdir()) / 1e6
    shares = report.foreign_line(interleave.foreign(found))
    title = f"{codec}, {megabytes:.0f} MB, batches of {batch}"
    return f"## {title}\n\n{table}\n\nRounds: {rounds}. {shares}"


# -- two workers


def _shares(folder: Path, codec: str, options: argparse.Namespace) -> str:
    """How much of the workers' CPU time the loader takes."""
    runs = [jobs.run(_job(folder, options.steps)) for _ in range(2)]
    found = [one for run in runs for one in run.results]
    share = report.Spread.of([one["loader_s"] / one["cpu_seconds"] for one in found])
    rate = report.Spread.of([run.rate * 2 * TRAINED for run in runs])
    rows = [(f"{codec}, shuffled", f"{share} ({report.at_most(share.median, AT_MOST)})", str(rate))]
    head = ("files", "loader's share of the CPU time of a worker", "examples/s")
    table = report.table(head, rows)
    shares = report.foreign_line([run.foreign for run in runs])
    return f"## {codec}, training. {TITLES['wide_deep']}\n\n{table}\n\nJobs: {len(runs)}. {shares}"


def _job(folder: Path, steps: int) -> jobs.Job:
    """A server and two workers, in sync mode."""
    argv = [sys.executable, "-m", "benchmarks.columnar", "--worker", str(folder)]
    return jobs.Job("training", jobs.fleet([*argv, "--steps", str(steps)], 1, 2))


def _train(folder: str, steps: int) -> None:
    """A process of the job: some steps, of which the loader's part is measured."""
    fleet.init()
    torch.manual_seed(0)
    plain = WideDeep(lambda rows, dim: fleet.nn.SparseEmbedding(dim))
    optimizer = fleet.distributed_optimizer(sgd(plain))
    train = stepper(fleet.distributed_model(plain), optimizer)
    if fleet.is_server():
        fleet.init_server()
        fleet.run_server()
        return
    fleet.init_worker()
    clicks = fleet.data.parquet(folder, COLUMNS)
    # rows that a look-ahead fetches are no cost of the files
    loader = fleet.shard(clicks.loader(TRAINED, shuffle=True), lookahead=False)
    batches, own = iter(loader), 0.0
    for step in range(WARMUP + steps):
        if step == WARMUP:
            # in the thread that calls `next`, and in those that load
            own, others = 0.0, _loading_s()
            process, began = time.process_time(), time.perf_counter()
        before = time.thread_time()
        batch = next(batches)
        own += time.thread_time() - before
        train(batch["ids"], batch["dense"], batch["label"][:, None])
    jobs.result(
        steps=steps,
        loader_s=own + _loading_s() - others,
        cpu_seconds=time.process_time() - process,
        seconds=time.perf_counter() - began,
    )
    fleet.barrier_worker()
    fleet.stop_worker()


def _loading_s() -> float:
    """The CPU time of the threads that load."""
    clocks = [
        time.pthread_getcpuclockid(thread.ident)
        for thread in threading.enumerate()
        if thread.name.startswith("fleetlight-data") and thread.ident is not None
    ]
    return sum(map(time.clock_gettime, clocks))


if __name__ == "__main__":
    sys.exit(main())
