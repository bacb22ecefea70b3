# SPDX-License-Identifier: Apache-2.0
"""Ids per second of a parameter server's tables on one core, and the memory of a row.

A table of 10 million ids is much larger than any cache, so this measures how well the kernels hide
the latency of memory. Ids are uniform, which no cache helps, or as in click logs: the r-th
most frequent has a probability proportional to r**-1.05. Frequent ids are anywhere among the rows.

Tables of several sizes take turns. If a hypervisor provides memory in pages of 4 KiB, 50 million
ids fill 1.3 million of them, with 10 MB of page tables, which the turns of the
other tables evict from the cache. So the comparison uses the batches at the end
of a turn, whose ids are new.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks import machine, report
from fleetlight import kernels

CLAIM = (
    "One core serves a table of 10 million ids (dimension 16, Adagrad, batches of 20,000) at 40 M "
    "ids/s pulled and 12 M pushed as ids come in click logs, 13 M and 6.5 M where they come "
    "uniformly. An id costs at most 160 bytes, 176 with four floats of meta data. At 50 million "
    "ids (dimension 8) an id takes at most twice as long as at 1 million, both tables in use."
)
DIM, BATCH, ZIPF = 16, 20_000, 1.05
PULL = {"zipf": 40.0, "uniform": 13.0}
PUSH = {"zipf": 12.0, "uniform": 6.5}
DEDUP = 80.0
BYTES = {0: 160, 4: 176}
SCALE = 2.0
#: measured batches, at the end of a turn, and all of a turn
TIMED, TURN = 25, 125
_STRIDE = 2_654_435_761  # a prime: steps of it visit every row in an order without pattern

Ids = NDArray[np.int64]


@dataclasses.dataclass(frozen=True)
class Work:
    """A table with all ids in it, and batches of them."""

    table: kernels.RowTable
    batches: dict[str, list[Ids]]
    rss_bytes: int  #: by how much the process grew
    insert_ms: report.Spread  #: of one batch of new ids


def resident_ids(ranks: Ids) -> Ids:
    """The ids of some ranks: the hash is a bijection, so they are distinct and have no pattern."""
    return kernels.splitmix64(ranks).view(np.int64)


def prepare(ids: int, dim: int, meta: int, batches: int) -> Work:
    """Fill a table and draw batches."""
    before = resident_bytes()
    how = kernels.Initializer("uniform", -0.05, 0.05)
    table = kernels.RowTable(dim, "adagrad", 1, how, meta)
    took = []
    for start in range(0, ids, BATCH):
        # batch by batch, as in training: the index grows meanwhile
        batch = resident_ids(np.arange(start, min(start + BATCH, ids)) * _STRIDE % ids)
        took.append(1e3 * BATCH / len(batch) * cpu_s(table.insert, [batch]))
    grown = resident_bytes() - before
    while table.growing:
        table.find(batch)
    # where memory is lent by a hypervisor, the first access to what was written costs more
    for start in range(0, ids, BATCH):
        table.find(resident_ids(np.arange(start, min(start + BATCH, ids))))
    table.rows[:, 0].sum()
    drawn = {kind: draw(kind, ids, batches) for kind in PULL}
    return Work(table, drawn, grown, report.Spread.of(took))


def draw(kind: str, ids: int, count: int) -> list[Ids]:
    """Batches of ids, the same in every run."""
    rng = np.random.default_rng(0)
    if kind == "uniform":
        return [resident_ids(rng.integers(0, ids, BATCH)) for _ in range(count)]
    chances = np.cumsum(np.arange(1, ids + 1, dtype=np.float64) ** -ZIPF)
    chances /= chances[-1]
    return [resident_ids(np.searchsorted(chances, rng.random(BATCH))) for _ in range(count)]


def resident_bytes() -> int:
    """Memory this process holds."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def cpu_s(call: Callable[[Ids], object], batches: Sequence[Ids]) -> float:
    """CPU seconds of calls with one batch each."""
    before = time.process_time()
    for batch in batches:
        call(batch)
    return time.process_time() - before


def calls(table: kernels.RowTable) -> dict[str, Callable[[Ids], object]]:
    """The measured calls, by name."""
    grads = np.random.default_rng(1).normal(size=(BATCH, table.dim)).astype(np.float32)
    hyper = table.rule.hyper({"lr": 0.01})
    out = np.empty((BATCH, table.dim), np.float32)
    return {
        "pull": functools.partial(table.pull, out=out),
        "push": functools.partial(table.push, grads=grads, hyper=hyper),
        "dedup for 2 servers": functools.partial(kernels.dedup, servers=2),
    }


def measure(works: Sequence[Work], rounds: int) -> dict[tuple[str, str], list[list[float]]]:
    """The rates of each table in each round, by call and kind of batches."""
    by_name = [calls(work.table) for work in works]
    todo = [(call, kind) for call in by_name[0] for kind in PULL]
    turns: dict[tuple[str, str], list[list[float]]] = {what: [] for what in todo}
    for _ in range(rounds):
        for call, kind in todo:
            paired = zip(works, by_name, strict=True)
            turns[call, kind].append([turn(named[call], w.batches[kind]) for w, named in paired])
    return turns


def turn(call: Callable[[Ids], object], batches: Sequence[Ids]) -> float:
    """M ids/s in the last batches of a turn."""
    cpu_s(call, batches[:-TIMED])
    return BATCH * len(batches[-TIMED:]) / 1e6 / cpu_s(call, batches[-TIMED:])


def rates_section(work: Work, rounds: int) -> str:
    """Rates with their bars."""
    bars = {
        **{("pull", kind): bar for kind, bar in PULL.items()},
        **{("push", kind): bar for kind, bar in PUSH.items()},
        ("dedup for 2 servers", "zipf"): DEDUP,
    }
    rows = []
    for (call, kind), turns in measure([work], rounds).items():
        bar, spread = bars.get((call, kind)), report.Spread.of(only for [only] in turns)
        verdict = "-" if bar is None else report.at_least(spread.median, bar)
        rows.append((f"{call}, {kind}", str(spread), verdict))
    return report.table(("batches of 20,000", "M ids/s: median (min..max)", "at least"), rows)


def bytes_section(ids: int, first: Work) -> str:
    """Bytes of an id, by the table's count and by the growth of the process."""
    rows = []
    for meta, bar in BYTES.items():
        work = first if meta == 0 else prepare(ids, DIM, meta, 1)
        counted, grown = work.table.nbytes / ids, work.rss_bytes / ids
        verdict = report.at_most(counted, bar)
        rows.append((str(meta), f"{counted:.1f}", f"{grown:.1f}", verdict))
    head = ("floats of meta data", "bytes per id", "growth of the process per id", "at most")
    return f"{report.table(head, rows)}\n\nInserting 20,000 ids, CPU ms: {first.insert_ms}."


def scale_section(sizes: Sequence[int], rounds: int) -> str:
    """Time of an id in tables of several sizes, relative to the smallest."""
    rows = []
    for (call, kind), turns in measure([prepare(n, 8, 0, TURN) for n in sizes], rounds).items():
        if call.startswith("dedup"):
            continue
        for k, size in enumerate(sizes):
            took = report.Spread.of(1e3 / by_size[k] for by_size in turns)
            ratio = report.Spread.of(by_size[0] / by_size[k] for by_size in turns)
            verdict = report.at_most(ratio.median, SCALE) if size == sizes[-1] else "-"
            what = f"{call}, {kind}, {size / 1e6:g} M ids"
            rows.append((what, str(took), str(ratio), verdict))
    times = f"of that at {sizes[0] / 1e6:g} M"
    head = ("batches of 20,000", "ns per id", times, "at most")
    return report.table(head, rows)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and write the result page."""
    parser = report.parser(__doc__, rounds=9)
    parser.add_argument("--ids", type=int, default=10_000_000)
    parser.add_argument("--scale", type=int, nargs="*", default=[1, 10, 50], help="millions of ids")
    options = parser.parse_args(argv)
    if options.quick:
        options.ids, options.rounds, options.scale = 30_000, 1, []
    cores = os.sched_getaffinity(0)
    with machine.Meter() as meter:
        os.sched_setaffinity(0, {max(cores)})
        prepare(5000, DIM, 0, 1)  # compiles, which needs memory too
        work = prepare(options.ids, DIM, 0, 50)
        sections = [
            f"## {options.ids:,} ids, one core\n\n{rates_section(work, options.rounds)}",
            f"## Memory\n\n{bytes_section(options.ids, work)}",
        ]
        del work
        if options.scale:
            scaled = scale_section([10**6 * millions for millions in options.scale], options.rounds)
            sections.append(f"## Size, dimension 8\n\n{scaled}")
        os.sched_setaffinity(0, cores)
    sections.append(f"Rounds: {options.rounds}. {report.foreign_line([meter.foreign()])}")
    return report.page("kernels", CLAIM, sections, options.quick)


if __name__ == "__main__":
    sys.exit(main())
