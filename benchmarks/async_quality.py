# SPDX-License-Identifier: Apache-2.0
"""Asynchronous modes against sync on Fleet's first parameter-server program: digits and an MLP.

Each mode trains from the same first values on the same records, with the same optimizer and the
same learning rate. `--data` is a folder with MNIST's test files, at any depth.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import fleetlight as fleet
from benchmarks import jobs, report
from benchmarks.models import mlp
from fleetlight.data import MNIST
from fleetlight.data.records import TableDataset

CLAIM = (
    "A dense MLP on parameter servers, the first program of Fleet's quick start: async and GeoSGD "
    "reach the accuracy of sync, in the median of the runs within 1 point, in the worst within 3, "
    "with 2, 4 and 8 workers and SGD, momentum, Adagrad and Adam."
)
SYNC = "sync"
#: the settings of a_sync_configs; None: without a_sync
MODES: Mapping[str, Mapping[str, int] | None] = {
    SYNC: None,
    "async": {},
    "geo, k=10": {"k_steps": 10},
    "async, queue of 1": {"send_queue_size": 1},
    "async, queue of 4": {"send_queue_size": 4},
    "async, queue of 4, merged": {"send_queue_size": 4, "max_merge": 4},
    "async, staleness 1": {"staleness": 1},
    "async, staleness 4": {"staleness": 4},
}
CLAIMED = ["async", "geo, k=10"]
#: points of accuracy that the median, and the worst run, may lose
MEDIAN, WORST = 1.0, 3.0
SERVERS, BATCH, HELD_BACK = 2, 64, 0.2
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9),
    "Adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.01),
    "Adam": lambda parameters: torch.optim.Adam(parameters, lr=0.001),
}


class Example(NamedTuple):
    """Images with pixels from -1 to 1, and their digits."""

    x: Tensor
    y: Tensor


def digits(data: str | None) -> Example:
    """All records; without data, noise, which shows only that training runs."""
    if data is None:
        return Example(torch.rand(640, 1, 28, 28), torch.randint(10, (640,)))
    found = sorted(Path(data).rglob("t10k-images-idx3-ubyte*"))
    if not found:
        raise jobs.BenchmarkError(
            f"no t10k-images-idx3-ubyte in {data}; give --data another folder"
        )
    images = MNIST(found[0].parent, train=False)
    x, y = zip(*(images[number] for number in range(len(images))), strict=True)
    pixels = torch.stack(x)
    return Example(pixels * 2 / pixels.max() - 1, torch.tensor(y))


def work(options: Mapping[str, Any]) -> None:
    """Run a server, or a worker that trains, tests and reports."""
    torch.set_num_threads(1)
    configs = options["configs"]
    settings = {} if configs is None else {"a_sync": True, "a_sync_configs": configs}
    fleet.init(strategy=fleet.DistributedStrategy(**settings))
    torch.manual_seed(options["seed"])
    model = fleet.distributed_model(mlp())
    made = OPTIMIZERS[options["optimizer"]](model.parameters())
    optimizer = fleet.distributed_optimizer(made)
    if fleet.is_server():
        fleet.init_server()
        fleet.run_server()
        return
    fleet.init_worker()
    train, test = (Example(*of) for of in torch.load(options["file"], weights_only=True))
    loader = fleet.shard(TableDataset("digits", train).loader(BATCH, shuffle=True))
    for epoch in range(options["epochs"]):
        loader.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    fleet.barrier_worker()
    jobs.result(rank=fleet.worker_index(), accuracy=accuracy(model, test))
    fleet.stop_worker()


def run(name: str, options: Mapping[str, Any], workers: int) -> jobs.Run:
    """A job of fleetrun, whose processes start as forks."""
    size = ["--server_num", str(SERVERS), "--worker_num", str(workers)]
    argv = [*jobs.launcher(), *size, __file__, "--worker", json.dumps(options)]
    done = jobs.run(jobs.Job(name, [jobs.Command(argv)], results=workers))
    jobs.check_same(done, "accuracy")
    return done


@torch.no_grad()
def accuracy(model: nn.Module, test: Example) -> float:
    """Of all records of the test, in per cent."""
    right: Tensor = model(test.x).argmax(1) == test.y
    return 100 * float(right.float().mean())


def row(optimizer: str, mode: str, of: Sequence[float], sync: Sequence[float]) -> tuple[str, ...]:
    """A line of the table: the accuracies of a mode beside those of sync."""
    own, beside = report.Spread.of(of), report.Spread.of(sync).median
    median, worst = own.median - beside, own.low - beside
    kept = "met" if median >= -MEDIAN and worst >= -WORST else "missed"
    compared = ("-",) * 3 if mode == SYNC else (f"{median:+.2f}", f"{worst:+.2f}", kept)
    return optimizer, mode, f"{own.median:.2f} ({own.low:.2f}..{own.high:.2f})", *compared


def measured(workers: int, records: Example, options: argparse.Namespace) -> str:
    """A section of the page: every optimizer and mode with this number of workers."""
    runs: dict[tuple[str, str], list[jobs.Run]] = {}
    for seed in range(options.rounds):
        order = torch.randperm(len(records.y), generator=torch.Generator().manual_seed(seed))
        cut = int(HELD_BACK * len(order))
        with tempfile.NamedTemporaryFile() as file:
            parts = [[one[of] for one in records] for of in (order[cut:], order[:cut])]
            torch.save(parts, file.name)
            for optimizer in options.optimizers:
                for mode in [SYNC, *options.modes]:
                    asked = {"file": file.name, "seed": seed, "optimizer": optimizer}
                    asked |= {"configs": MODES[mode], "epochs": options.epochs}
                    done = run(f"seed {seed}, {optimizer}, {mode}", asked, workers)
                    runs.setdefault((optimizer, mode), []).append(done)
                    print(f"seed {seed}, {optimizer}, {mode}: {done.results[0]}", flush=True)
    reached = {name: [run.results[0]["accuracy"] for run in of] for name, of in runs.items()}
    rows = [row(*name, of, reached[name[0], SYNC]) for name, of in reached.items()]
    head = (
        *("optimizer", "mode", "accuracy, %: median (min..max)", "median less sync's"),
        *("worst less sync's", f"within {MEDIAN:g} and {WORST:g}"),
    )
    shares = report.foreign_line([run.foreign for of in runs.values() for run in of])
    title = f"{workers} workers and {SERVERS} servers, {options.epochs} epochs, batches of {BATCH}"
    return f"## {title}\n\n{report.table(head, rows)}\n\nSeeds: {options.rounds}. {shares}"


def main(argv: Sequence[str] | None = None) -> int:
    """Train everything with every seed, one a round, and write the result page."""
    parser = report.parser(__doc__, rounds=5)
    add = parser.add_argument
    add("--data", help="folder with MNIST's test files")
    add("--workers", type=int, nargs="+", default=[2, 4, 8])
    add("--optimizers", nargs="+", choices=list(OPTIMIZERS), default=list(OPTIMIZERS))
    add("--modes", nargs="+", choices=[*MODES][1:], default=CLAIMED)
    add("--epochs", type=int, default=6)
    add("--worker", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.worker:
        work(options.worker)
        return 0
    if options.quick:
        options.rounds, options.epochs, options.workers = 1, 1, [2]
    elif options.data is None:
        parser.error("--data: got none, expected a folder with MNIST's test files")
    records = digits(options.data)
    sections = (measured(workers, records, options) for workers in options.workers)
    return report.page("async_quality", CLAIM, sections, options.quick)


if __name__ == "__main__":
    sys.exit(main())
