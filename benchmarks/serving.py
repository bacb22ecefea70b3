# SPDX-License-Identifier: Apache-2.0
"""What publishing costs training, the size of deltas, and the speed of lookups in a reader.

One process trains a table on its embedded server, which shares the interpreter with the publisher:
the worst case. Turns with a publication and turns without one alternate.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

import fleetlight as fleet
from benchmarks import report
from fleetlight.errors import PublicationError
from fleetlight.fleet.protocols import RowPublisher
from fleetlight.serve import Reader

CLAIM = (
    "A delta of 1% of the rows has at most 3% of the bytes of a base. One publication in 10 s "
    "costs at most 2% of the steps per second. A reader looks up at least 20 million ids per "
    "second and core, rows of 16 values, Zipf ids, also while a delta lies over the base. Its "
    "rows are at most 2 s older than the period of publications."
)
DIM, BATCH, ZIPF = 16, 4096, 1.1
Ids = NDArray[np.int64]


class Rows(nn.Module):
    """A sum over rows, so that the table is all the work."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = fleet.nn.SparseEmbedding(DIM)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.emb(ids).sum()
        return out


class Training:
    """A model whose table has all ids, and steps that change a share of them."""

    def __init__(self, rows: int) -> None:
        fleet.init()
        self.rows, self._random = rows, np.random.default_rng(0)
        model = Rows()
        optimizer = torch.optim.Adagrad(model.parameters(), lr=0.01)
        self.model = fleet.distributed_model(model)
        self.optimizer = fleet.distributed_optimizer(optimizer)
        fleet.init_worker()
        for start in range(0, rows, 1 << 20):
            self.model(torch.arange(start, min(start + (1 << 20), rows)))

    def some(self, share: float) -> Ids:
        """The ids that one turn changes."""
        return self._random.choice(self.rows, int(share * self.rows), replace=False)

    def step(self, ids: Ids) -> None:
        """Train on a batch."""
        self.model(torch.from_numpy(ids)).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def turn(self, ids: Ids, seconds: float, first: Callable[[], object]) -> float:
        """Steps per second of a turn, which begins with `first`."""
        began, steps = time.perf_counter(), 0
        first()
        while time.perf_counter() - began < seconds:
            at = steps * BATCH % (len(ids) - BATCH)
            self.step(ids[at : at + BATCH])
            steps += 1
        return steps / (time.perf_counter() - began)


def publishing(training: Training, target: Path, options: argparse.Namespace) -> Iterator[str]:
    """The lines of the first part."""
    from concurrent.futures import ThreadPoolExecutor

    publisher = fleet.publish(target, every_s=1e9, compact_at=1e9)
    assert publisher is not None
    base = publisher.publish_now()
    rates: dict[bool, list[float]] = {True: [], False: []}
    with ThreadPoolExecutor(1) as beside:
        for number in range(2 * options.turns):
            publishes = number % 2 == (number // 2) % 2
            ids = training.some(0.01)

            def begin(publishes: bool = publishes) -> None:
                if publishes:
                    beside.submit(_publish, publisher)

            rates[publishes].append(training.turn(ids, options.turn_s, begin))
    delta = _delta(training, publisher)
    ratios = [a / b for a, b in zip(rates[True], rates[False], strict=True)]
    yield f"Base: {base.bytes / 1e6:,.0f} MB of {training.rows:,} rows"
    share = delta[1] / base.bytes
    yield f"Delta of {delta[0]:,} rows: {delta[1] / 1e6:,.1f} MB, {share:.2%} of the base"
    yield (
        f"Steps per second with one publication in {options.turn_s:g} s over those without: "
        f"median {np.median(ratios):.3f} of {len(ratios)} pairs, {min(ratios):.3f} to "
        f"{max(ratios):.3f}"
    )


def _publish(publisher: RowPublisher) -> None:
    try:
        publisher.publish_now()
    except PublicationError as error:
        print(error, file=sys.stderr)


def _delta(training: Training, publisher: RowPublisher) -> tuple[int, int]:
    """Rows and bytes of a delta of 1%."""
    publisher.publish_now()
    ids = training.some(0.01)
    for start in range(0, len(ids), BATCH):
        training.step(ids[start : start + BATCH])
    made = publisher.publish_now()
    return sum(file.rows for file in made.files), made.bytes


#: prints the largest age of rows until its input ends
AGES = """
import sys, threading
from fleetlight.serve import Reader

over, oldest = threading.Event(), 0.0
threading.Thread(target=lambda: (sys.stdin.read(), over.set()), daemon=True).start()
with Reader(sys.argv[1], cache=sys.argv[2]) as reader:
    print("ready", flush=True)
    while not over.wait(0.05):
        oldest = max(oldest, reader.age_s)
print(oldest)
"""


def ages(training: Training, target: Path, options: argparse.Namespace) -> Iterator[str]:
    """The lines about the age of rows in a reader of another process, during training."""
    period = options.turn_s
    publisher = fleet.publish(target, every_s=period)
    assert publisher is not None
    publisher.publish_now()
    with tempfile.TemporaryDirectory() as cache:
        command = [sys.executable, "-c", AGES, str(target), cache]
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as reader:
            assert reader.stdin is not None
            assert reader.stdout is not None
            # the reader has built its base; the publication after it is the first that counts
            reader.stdout.readline()
            for _ in range(options.periods):
                training.turn(training.some(0.01), period, lambda: None)
            reader.stdin.close()
            oldest = float(reader.stdout.read())
    yield (
        f"The oldest rows that a reader had, with a publication in {period:g} s, over "
        f"{options.periods} of them: {oldest:.2f} s"
    )


def zipf(rows: int, count: int) -> Ids:
    """Ids whose popularity falls by a power; popular ids are far apart."""
    random = np.random.default_rng(1)
    chances = np.cumsum(np.arange(1, rows + 1, dtype=np.float64) ** -ZIPF)
    found = np.searchsorted(chances / chances[-1], random.random(count))
    return random.permutation(rows)[found]


def lookups(target: Path, rows: int, repeats: int) -> Iterator[str]:
    """The lines of the second part."""
    with tempfile.TemporaryDirectory() as cache:
        began = time.perf_counter()
        reader = Reader(target, cache=cache, follow=False)
        yield f"A reader starts in {time.perf_counter() - began:.1f} s"
        ids = zipf(rows, 1 << 21)
        for size in (1 << 10, 1 << 14, 1 << 18, 1 << 21):
            batches = [ids[at : at + size] for at in range(0, len(ids), size)]
            out, rates = np.empty((size, DIM), np.float32), []
            for _ in range(repeats):
                cpu = time.process_time()
                for batch in batches:
                    reader.lookup("emb", batch, out)
                rates.append(len(ids) / (time.process_time() - cpu) / 1e6)
            yield (
                f"Batches of {size:,} Zipf ids, base and delta: median {np.median(rates):.1f} "
                f"million ids per CPU second, {min(rates):.1f} to {max(rates):.1f}"
            )


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and write the result page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--turn_s", type=float, default=10.0)
    parser.add_argument("--periods", type=int, default=6)
    parser.add_argument("--repeats", type=int, default=11)
    parser.add_argument("--write", action="store_true", help="keep the page in benchmarks/results")
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder, "target")
        training = Training(options.rows)
        lines = [*publishing(training, target, options)]
        lines += ages(training, Path(folder, "aged"), options)
        fleet.stop_worker()
        lines += lookups(target, options.rows, options.repeats)
    report.page("serving", CLAIM, ["\n".join(f"- {line}" for line in lines)], keep=options.write)
    return 0


if __name__ == "__main__":
    sys.exit(main())
