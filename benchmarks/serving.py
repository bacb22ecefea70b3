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
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

import fleetlight as fleet
from benchmarks import interleave, report
from fleetlight.errors import PublicationError
from fleetlight.fleet.protocols import RowPublisher
from fleetlight.serve import Reader
from fleetlight.serve.view import TableView

CLAIM = (
    "A delta of 1% of the rows has at most 3% of the bytes of a base. One publication in 10 s "
    "costs at most 2% of the steps per second. A reader looks up at least 20 million ids per "
    "second and core, rows of 16 values, Zipf ids, also while a delta lies over the base. Its "
    "rows are at most 2 s older than the period of publications."
)
DIM, BATCH, ZIPF, PERIODS = 16, 4096, 1.1, 6
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

    def train(self, ids: Ids) -> None:
        """Train on all of some ids."""
        for start in range(0, len(ids), BATCH):
            self.step(ids[start : start + BATCH])

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
    publisher = fleet.publish(target, every_s=1e9, compact_at=1e9)
    assert publisher is not None
    base = publisher.publish_now()
    yield f"Base: {base.bytes / 1e6:,.0f} MB of {training.rows:,} rows"
    rates: dict[str, list[float]] = {"published": [], "plain": []}
    with ThreadPoolExecutor(1) as beside:

        def play(publishes: bool) -> float:
            ids = training.some(0.01)
            # each publication has 1% of the rows
            training.train(ids)
            begin = partial(beside.submit, _publish, publisher) if publishes else lambda: None
            rate = training.turn(ids, options.turn_s, begin)
            if not publishes:
                publisher.publish_now()
            return rate

        plays = {"published": partial(play, True), "plain": partial(play, False)}
        for name, rate in interleave.in_turn(plays, options.rounds):
            rates[name].append(rate)
    # what one publication costs, as a share of the steps of a period
    share = options.turn_s / options.period_s
    costs = [(1 - a / b) * share for a, b in zip(*rates.values(), strict=True)]
    cost = report.Spread.of(100 * cost for cost in costs)
    delta = _delta(training, publisher)
    publisher.stop(publish=False)
    share = delta[1] / base.bytes
    yield f"Delta of {delta[0]:,} rows: {delta[1] / 1e6:,.1f} MB, {share:.2%} of the base"
    yield (
        f"One publication in {options.period_s:g} s costs {cost} % of the steps: "
        f"{len(costs)} pairs of turns of {options.turn_s:g} s, with a publication and without"
    )


def _publish(publisher: RowPublisher) -> None:
    try:
        publisher.publish_now()
    except PublicationError as error:
        print(error, file=sys.stderr)


def _delta(training: Training, publisher: RowPublisher) -> tuple[int, int]:
    """Rows and bytes of a delta of 1%."""
    publisher.publish_now()
    training.train(training.some(0.01))
    made = publisher.publish_now()
    return sum(file.rows for file in made.files), made.bytes


#: prints the largest age of rows of the first publication, and of the later ones
AGES = """
import sys, threading
from fleetlight.serve import Reader

over, oldest = threading.Event(), [0.0, 0.0]
threading.Thread(target=lambda: (sys.stdin.read(), over.set()), daemon=True).start()
with Reader(sys.argv[1], cache=sys.argv[2]) as reader:
    print("ready", flush=True)
    while not over.wait(0.02):
        view = reader.view
        age = reader.age_s
        if reader.view is view:
            oldest[view.number > 1] = max(oldest[view.number > 1], age)
print(*oldest)
"""


def ages(training: Training, target: Path, period: float) -> Iterator[str]:
    """The lines about the age of rows in a reader of another process, during training."""
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
            # the reader has built its base
            reader.stdout.readline()
            for _ in range(PERIODS):
                training.turn(training.some(0.01), period, lambda: None)
            publisher.stop(publish=False)
            reader.stdin.close()
            base, later = map(float, reader.stdout.read().split())
    yield (
        f"The oldest rows that a reader had, with a publication in {period:g} s, over "
        f"{PERIODS} of them: {later:.2f} s ({base:.2f} s of the base before the first "
        "delta)"
    )


def zipf(rows: int, count: int) -> Ids:
    """Ids whose popularity falls by a power; popular ids are far apart."""
    random = np.random.default_rng(1)
    chances = np.cumsum(np.arange(1, rows + 1, dtype=np.float64) ** -ZIPF)
    found = np.searchsorted(chances / chances[-1], random.random(count))
    return random.permutation(rows)[found]


def _base_and_delta(training: Training, target: Path) -> None:
    publisher = fleet.publish(target, every_s=1e9)
    assert publisher is not None
    publisher.publish_now()
    _delta(training, publisher)


def _looking_up(view: TableView, out: NDArray[np.float32]) -> Callable[[Ids, Ids], object]:
    return lambda ids, _: view.lookup(ids, out)


def _rate(look: Callable[[Ids, Ids], object], ids: Ids, place: Ids, size: int) -> float:
    """Millions of ids per CPU second."""
    cpu = time.process_time()
    for at in range(0, len(ids), size):
        look(ids[at : at + size], place[at : at + size])
    return len(ids) / (time.process_time() - cpu) / 1e6


def lookups(target: Path, rows: int, repeats: int) -> Iterator[str]:
    """The lines of the second part."""
    with tempfile.TemporaryDirectory() as cache:
        began = time.perf_counter()
        reader = Reader(target, cache=cache, follow=False)
        yield f"A reader starts in {time.perf_counter() - began:.1f} s"
        ids = zipf(rows, 1 << 21)
        reader.close()
        layered = reader.view._tables["emb"]
        alone = TableView(layered.entry, layered._lower, None)
        place = np.random.default_rng(2).permutation(rows)[ids]
        values = layered._lower.rows[: rows * DIM].reshape(rows, DIM)
        for size in (1 << 10, 1 << 14, 1 << 18, 1 << 21):
            out = np.empty((size, DIM), np.float32)

            def take(_: Ids, at: Ids, out: NDArray[np.float32] = out) -> None:
                np.take(values, at, axis=0, out=out, mode="clip")

            ways: dict[str, Callable[[Ids, Ids], object]] = {
                "base and delta": _looking_up(layered, out),
                "a base alone": _looking_up(alone, out),
                "`numpy.take` of as many places": take,
            }
            rates: dict[str, list[float]] = {name: [] for name in ways}
            plays = {name: partial(_rate, look, ids, place, size) for name, look in ways.items()}
            for name, rate in interleave.in_turn(plays, repeats):
                rates[name].append(rate)
            found = "; ".join(f"{name} {report.Spread.of(each)}" for name, each in rates.items())
            yield f"Million Zipf ids per CPU second in batches of {size:,}: {found}"


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and write the result page."""
    parser = report.parser(__doc__, rounds=20)
    add = parser.add_argument
    add("--rows", type=int, default=10_000_000)
    add("--turn_s", type=float, default=2.0)
    add("--period_s", type=float, default=10.0, help="of publications")
    options = parser.parse_args(argv)
    if options.quick:
        options.rows, options.rounds, options.turn_s, options.period_s = 500_000, 1, 0.2, 1.0
    lookup_rounds = 1 if options.quick else 11
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder, "lookups")
        training = Training(options.rows)
        lines = [*publishing(training, Path(folder, "deltas"), options)]
        lines += ages(training, Path(folder, "ages"), options.period_s)
        _base_and_delta(training, target)
        fleet.stop_worker()
        lines += lookups(target, options.rows, lookup_rounds)
    return report.page("serving", CLAIM, [f"- {line}" for line in lines], options.quick)


if __name__ == "__main__":
    sys.exit(main())
