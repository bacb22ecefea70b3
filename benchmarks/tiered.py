# SPDX-License-Identifier: Apache-2.0
"""A table ten times its `memory`: wide & deep beside the same table in memory, and single calls.

One process with its server inside trains both in turns of some steps, in a plain loop or under
look-ahead. The page cache of the file is dropped before each turn, so that a read is one of the
device; one job keeps it, as a server with free memory does. The single calls are compared with the
device's own random reads of 4 KiB.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits

import fleetlight as fleet
from benchmarks import forked, interleave, report
from benchmarks.peers.ps_timed import BATCH, NUMBERS, SLOTS, WIDTH
from fleetlight.kernels import Initializer, RowTable, TieredRowTable, dedup, splitmix64
from fleetlight.ps.tables.tier.row_log import RowLog
from fleetlight.ps.update import Floats, Ids

CLAIM = (
    "Wide & deep in async, ids by Zipf 1.2: with a table 10 times its memory, 0.7 of the steps per "
    "second of a table in memory."
)
AT_LEAST = 0.7
DIM, CALL_IDS = 16, 20_000
MEMORY, FILE = "in memory", "a tenth in memory"
#: exponents of Zipf's law; 0: uniform
KINDS = {"zipf 1.2": 1.2, "zipf 1.05": 1.05, "uniform": 0.0}
#: weights and Adagrad's state
ROW_BYTES = 8 * DIM
_FILLED = 50_000
_DIFFERENT = 800
_READ = 4096


class WideDeep(nn.Module):
    """The model of `ps_models`, with rows of dim 16."""

    def __init__(self, name: str, memory: int | None) -> None:
        super().__init__()
        self.rows = fleet.nn.SparseEmbedding(DIM, table=name, memory=memory)
        self.mlp = nn.Sequential(
            *(nn.Linear(SLOTS * DIM + NUMBERS, WIDTH), nn.ReLU()),
            *(nn.Linear(WIDTH, WIDTH), nn.ReLU()),
            *(nn.Linear(WIDTH, WIDTH), nn.ReLU()),
            nn.Linear(WIDTH, 1),
        )
        self.wide = nn.Linear(NUMBERS, 1)

    def forward(self, ids: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        """Log-odds of each record."""
        deep: torch.Tensor = self.mlp(torch.cat([self.rows(ids).flatten(1), numbers], 1))
        wide: torch.Tensor = self.wide(numbers)
        return deep + wide


def ids_of(ranks: NDArray[np.int64]) -> Ids:
    """The ids of some ranks: the hash is a bijection, so they are distinct and have no pattern."""
    return splitmix64(ranks).view(np.int64)


def drawn(kind: str, rows: int, shape: tuple[int, ...], count: int) -> Iterator[Ids]:
    """Batches of ids, the same in every run."""
    random = np.random.default_rng(0)
    if not KINDS[kind]:
        for _ in range(count):
            yield ids_of(random.integers(0, rows, shape).reshape(-1)).reshape(shape)
        return
    chances = np.cumsum(np.arange(1, rows + 1, dtype=np.float64) ** -KINDS[kind])
    chances /= chances[-1]
    for _ in range(count):
        ranks = np.searchsorted(chances, random.random(shape).reshape(-1))
        yield ids_of(ranks).reshape(shape)


def in_order(rows: int) -> Iterator[Ids]:
    """All ids once, frequent and rare ones mixed, as a checkpoint has them."""
    order = np.random.default_rng(1).permutation(rows)
    for start in range(0, rows, _FILLED):
        yield ids_of(order[start : start + _FILLED])


def drop_cache(folder: str) -> None:
    """Drop the page cache of this process's files in a folder."""
    for entry in os.listdir("/proc/self/fd"):
        try:
            path = os.readlink(f"/proc/self/fd/{entry}")
        except OSError:
            continue
        if path.startswith(folder):
            os.fdatasync(int(entry))
            os.posix_fadvise(int(entry), 0, 0, os.POSIX_FADV_DONTNEED)


def trained(options: Mapping[str, Any]) -> dict[str, Any]:
    """Train both variants in turns."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    rows, folder = options["rows"], options["folder"]
    fleet.init(
        strategy=fleet.DistributedStrategy(a_sync=True, a_sync_configs={"table_folder": folder})
    )
    models = {MEMORY: WideDeep(MEMORY, None), FILE: WideDeep(FILE, rows * ROW_BYTES // 10)}
    for model in models.values():
        fleet.distributed_model(model)
    optimizers = {
        name: fleet.distributed_optimizer(torch.optim.Adagrad(model.parameters(), lr=0.01))
        for name, model in models.items()
    }
    fleet.init_worker()
    for batch in in_order(rows):
        for model in models.values():
            model.rows(torch.from_numpy(batch))
    batches = [*drawn(options["kind"], rows, (BATCH, SLOTS), _DIFFERENT)]
    numbers = torch.rand(BATCH, NUMBERS)
    labels = (numbers.sum(1, keepdim=True) > NUMBERS / 2).float()

    def turn_of(name: str) -> Callable[[], None]:
        following = map(torch.from_numpy, itertools.cycle(batches))

        def step(ids: torch.Tensor) -> None:
            out = models[name](ids, numbers)
            optimizers[name].zero_grad()
            binary_cross_entropy_with_logits(out, labels).backward()  # type: ignore[no-untyped-call]
            optimizers[name].step()

        def turn() -> None:
            if options["ahead"]:
                fleet.run_steps(step, following, options["steps"])
                return
            for ids in itertools.islice(following, options["steps"]):
                step(ids)

        return turn

    turns = {name: turn_of(name) for name in models}
    interleave.interleave(turns, 1, 1, options["warmup"] // options["steps"], lambda: None)

    def begin() -> None:
        if not options["cached"]:
            drop_cache(folder)

    rounds = interleave.interleave(turns, options["rounds"], options["turns"], 1, begin)
    for one in rounds:
        one["steps"] *= options["steps"]
    fleet.stop_worker()
    return {"rounds": rounds, "cpu_seconds": sum(one["cpu_s"] for one in rounds)}


class CountedLog(RowLog):
    """Counts the rows that were read, without those that are moved together."""

    rows_read = 0

    def read(self, positions: Ids) -> Floats:
        """See `RowLog`."""
        self.rows_read += len(positions)
        return super().read(positions)

    def sparse_positions(self) -> NDArray[np.int64] | None:
        """See `RowLog`."""
        found = super().sparse_positions()
        self.rows_read -= 0 if found is None else len(found)
        return found


def called(options: Mapping[str, Any]) -> dict[str, Any]:
    """Pull and push batches of ids, with a table in memory and a tiered one in turns."""
    rows, folder = options["rows"], options["folder"]
    how, log = Initializer("uniform", -0.05, 0.05), CountedLog(Path(folder), FILE, 2 * DIM + 1)
    slots = TieredRowTable.slots_in(rows * ROW_BYTES // 10, 2 * DIM)
    tables = {
        MEMORY: RowTable(DIM, "adagrad", 1, how),
        FILE: TieredRowTable(DIM, "adagrad", 1, how, slots=slots, store=log),
    }
    for batch in in_order(rows):
        for table in tables.values():
            table.insert(batch)
    grads = np.random.default_rng(2).normal(size=(CALL_IDS, DIM)).astype(np.float32)
    hyper = tables[MEMORY].rule.hyper({"lr": 0.01})
    result: dict[str, Any] = {"read": [], "seconds": [], "ms": {MEMORY: [], FILE: []}}
    for number, batch in enumerate(drawn(options["kind"], rows, (CALL_IDS,), options["calls"])):
        ids = dedup(batch).ids
        for name, table in tables.items():
            drop_cache(folder)
            before, start = log.rows_read, time.perf_counter()
            table.pull(ids)
            table.push(ids, grads[: len(ids)], hyper, distinct=True)
            seconds = time.perf_counter() - start
            if number < options["calls"] // 2:  # to warm up
                continue
            result["ms"][name].append(1e3 * seconds)
            if name == FILE:
                result["read"].append(log.rows_read - before)
                result["seconds"].append(seconds)
    result["device"] = device_reads(folder, log.nbytes)
    return {**result, "cpu_seconds": time.process_time()}


def device_reads(folder: str, size: int) -> list[float]:
    """Random reads of 4 KiB per second, of a file of this size, asked for together."""
    random, rates = np.random.default_rng(3), []
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        for _ in range(0, size, 1 << 20):
            file.write(random.bytes(1 << 20))
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        for _ in range(5):
            drop_cache(folder)
            offsets = (np.unique(random.integers(0, size // _READ, 10_000)) * _READ).tolist()
            start = time.perf_counter()
            for offset in offsets:
                os.posix_fadvise(file.fileno(), offset, _READ, os.POSIX_FADV_WILLNEED)
            for offset in offsets:
                os.pread(file.fileno(), _READ, offset)
            rates.append(len(offsets) / (time.perf_counter() - start))
    return rates


def sections(options: argparse.Namespace) -> Iterator[str]:
    """Training, then single calls."""
    forked.preload()
    training, calls = [], []
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        given = {**vars(options), "folder": folder, "cached": False, "ahead": False}
        for kind in options.kinds:
            given["kind"] = kind
            [trains] = forked.run_as(f"training, {kind}", trained, given, [{}]).results
            [single] = forked.run_as(f"calls, {kind}", called, given, [{}]).results
            training.append(_training_row(kind, trains))
            calls.append(_calls_row(kind, single))
        for kind in options.kinds:
            given |= {"kind": kind, "ahead": True}
            [trains] = forked.run_as(f"look-ahead, {kind}", trained, given, [{}]).results
            training.append(_training_row(f"{kind}, look-ahead", trains))
        given |= {"kind": options.kinds[0], "cached": True, "ahead": False}
        [trains] = forked.run_as("training, cached", trained, given, [{}]).results
        training.append(_training_row(f"{options.kinds[0]}, page cache kept", trains))
    head = ("ids", f"steps/s {MEMORY}", f"steps/s {FILE}", "ratio: median (min..max)", "at least")
    title = f"## Wide & deep, async, {options.rows:,} rows of {ROW_BYTES} bytes"
    yield f"{title}\n\n{report.table(head, training)}"
    columns = (
        "ids",
        f"ms {MEMORY}",
        f"ms {FILE}",
        "rows read",
        "rows read/s",
        "random reads of the device/s",
    )
    title = f"## A pull and a push of {CALL_IDS:,} ids"
    yield f"{title}\n\n{report.table(columns, calls)}"


def _training_row(kind: str, found: Mapping[str, Any]) -> tuple[str, ...]:
    plain, tiered = interleave.series([found["rounds"]])
    ratio = report.Spread.of([a / b for a, b in zip(tiered.rates, plain.rates, strict=True)])
    bar = "-"
    if kind.startswith("zipf 1.2") and "cache" not in kind:
        bar = f"{AT_LEAST}: {'met' if ratio.median >= AT_LEAST else 'missed'}"
    rates = (str(report.Spread.of(one.rates)) for one in (plain, tiered))
    return (kind, *rates, str(ratio), bar)


def _calls_row(kind: str, found: Mapping[str, Any]) -> tuple[str, ...]:
    rates = [n / s for n, s in zip(found["read"], found["seconds"], strict=True)]
    spreads = (found["ms"][MEMORY], found["ms"][FILE], found["read"], rates, found["device"])
    return (kind, *(str(report.Spread.of(values)) for values in spreads))


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, and write the result page."""
    options = _parse(argv)
    report.page("tiered", CLAIM, sections(options), keep=options.write)
    return 0


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kinds", nargs="+", choices=[*KINDS], default=[*KINDS])
    parser.add_argument("--rows", type=int, default=2_000_000)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--warmup", type=int, default=150)
    parser.add_argument("--calls", type=int, default=40)
    parser.add_argument("--folder", default=None, help="on the disk to measure")
    parser.add_argument("--write", action=argparse.BooleanOptionalAction, default=True)
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
