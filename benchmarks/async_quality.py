# SPDX-License-Identifier: Apache-2.0
"""Asynchronous modes against sync on Fleet's first parameter-server program: digits and an MLP.

Each mode trains from the same first values on the same records, with the same optimizer and the
same learning rate. `--data` is a folder with MNIST's test files, at any depth.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import fleetlight as fleet
from benchmarks import forked, jobs, report
from benchmarks.slow_quality_data import Example, put, tables

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
}
#: other variants: pushes in a queue, alone, merged or with a bound
OTHERS: Mapping[str, Mapping[str, int]] = {
    "async, queue of 1": {"send_queue_size": 1},
    "async, queue of 4": {"send_queue_size": 4},
    "async, queue of 4, merged": {"send_queue_size": 4, "max_merge": 4},
    "async, staleness 1": {"staleness": 1},
    "async, staleness 4": {"staleness": 4},
}
#: points of accuracy that the median, and the worst run, may lose
MEDIAN, WORST = 1.0, 3.0
SERVERS = 2
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9),
    "Adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.01),
    "Adam": lambda parameters: torch.optim.Adam(parameters, lr=0.001),
}


def work(options: Mapping[str, Any]) -> dict[str, Any]:
    """Run a server, or a worker that trains, tests and reports."""
    began, cpu = time.perf_counter(), time.process_time()
    torch.set_num_threads(1)
    fleet.init(strategy=fleet.DistributedStrategy(**options["settings"]))
    torch.manual_seed(options["seed"])
    model = fleet.distributed_model(mlp())
    made = OPTIMIZERS[options["optimizer"]](model.parameters())
    optimizer = fleet.distributed_optimizer(made)
    facts: dict[str, Any] = {}
    if fleet.is_server():
        fleet.init_server()
        fleet.run_server()
    else:
        fleet.init_worker()
        train, test = tables("digits", Path(options["folder"]))
        steps = trained(model, optimizer, train, options)
        fleet.barrier_worker()
        facts = {"steps": steps, "accuracy": accuracy(model, test)}
        fleet.stop_worker()
    facts |= {"seconds": time.perf_counter() - began, "cpu_seconds": time.process_time() - cpu}
    return facts


def mlp() -> nn.Module:
    """Two layers of tanh."""
    return nn.Sequential(
        *(nn.Flatten(), nn.Linear(784, 128), nn.Tanh()),
        *(nn.Linear(128, 128), nn.Tanh(), nn.Linear(128, 10)),
    )


def trained(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    train: Any,
    options: Mapping[str, Any],
) -> int:
    """How many steps this worker made."""
    loader = fleet.shard(train.loader(options["batch"], shuffle=True))
    steps = 0
    for epoch in range(options["epochs"]):
        loader.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            steps += 1
    return steps


@torch.no_grad()
def accuracy(model: nn.Module, test: Any) -> float:
    """Of all records of the test, in per cent."""
    records: Example = test.columns
    right: Tensor = model(records.x).argmax(1) == records.y
    return 100 * float(right.float().mean())


@dataclasses.dataclass(frozen=True)
class Reached:
    """The accuracies of one mode, run by run, beside those of sync."""

    mode: str
    accuracies: Sequence[float]
    sync: Sequence[float]

    @property
    def verdict(self) -> str:
        """Whether the median and the worst run are close enough to the median of sync."""
        beside = report.Spread.of(self.sync).median
        of = report.Spread.of(self.accuracies)
        kept = of.median >= beside - MEDIAN and of.low >= beside - WORST
        return "met" if kept else "missed"

    def row(self, optimizer: str) -> tuple[str, ...]:
        """A line of the table."""
        beside = report.Spread.of(self.sync).median
        of = report.Spread.of(self.accuracies)
        differs = "-" if self.mode == SYNC else f"{of.median - beside:+.2f}"
        worst = "-" if self.mode == SYNC else f"{of.low - beside:+.2f}"
        verdict = "-" if self.mode == SYNC else self.verdict
        spread = f"{of.median:.2f} ({of.low:.2f}..{of.high:.2f})"
        return optimizer, self.mode, spread, differs, worst, verdict


def signed(folder: Path) -> None:
    """Pixels from -1 to 1 instead of mean 0 and deviation 1: most of an image is then -1."""
    path = folder / "digits.pt"
    kept = torch.load(path, weights_only=True)
    least, most = (f(kept["train"][0]) for f in (torch.min, torch.max))
    scaled = {n: ((x - least) / (most - least) * 2 - 1, y) for n, (x, y) in kept.items()}
    torch.save(scaled, path)


def measured(workers: int, options: argparse.Namespace) -> str:
    """A section of the page: every optimizer and mode with this number of workers."""
    runs: dict[tuple[str, str], list[jobs.Run]] = {}
    for seed in range(options.seeds):
        with tempfile.TemporaryDirectory() as folder:
            put("digits", Path(options.data), seed, Path(folder))
            if options.pixels == "signed":
                signed(Path(folder))
            for optimizer in options.optimizers:
                for mode in [SYNC, *options.modes]:
                    asked = {"folder": folder, "seed": seed, "optimizer": optimizer}
                    asked |= {"settings": settings(mode), "epochs": options.epochs, "batch": 64}
                    one = _run(f"{optimizer}, {mode}, {workers} workers", asked, workers)
                    runs.setdefault((optimizer, mode), []).append(one)
    rows = [
        Reached(mode, _accuracies(of), _accuracies(runs[optimizer, SYNC])).row(optimizer)
        for (optimizer, mode), of in runs.items()
    ]
    head = (
        *("optimizer", "mode", "accuracy, %: median (min..max)", "median less sync's"),
        *("worst less sync's", f"within {MEDIAN:g} and {WORST:g}"),
    )
    shares = [run.foreign for of in runs.values() for run in of]
    title = (
        f"{workers} workers and {SERVERS} servers, {options.epochs} epochs, batches of 64, "
        + {"signed": "pixels from -1 to 1", "normal": "pixels of mean 0"}[options.pixels]
    )
    return (
        f"## {title}\n\n{report.table(head, rows)}\n\nSeeds: {options.seeds}. "
        f"{report.foreign_line(shares)}"
    )


def settings(mode: str) -> dict[str, Any]:
    """The strategy of a mode."""
    configs = {**MODES, **OTHERS}[mode]
    return {"a_sync": False} if configs is None else {"a_sync": True, "a_sync_configs": configs}


def _run(name: str, asked: Mapping[str, Any], workers: int) -> jobs.Run:
    run = forked.run_as(name, work, asked, _environments(workers))
    reached = [result["accuracy"] for result in run.results if "accuracy" in result]
    if len(set(reached)) > 1:
        raise jobs.BenchmarkError(f"{name}: the workers' accuracies differ: {reached}")
    print(f"seed {asked['seed']}, {name}: {reached[0]:.2f} %, {run.wall_s:.1f} s", flush=True)
    return run


def _environments(workers: int) -> list[dict[str, str]]:
    endpoints = [f"127.0.0.1:{jobs.free_port()}" for _ in range(SERVERS)]
    common = {
        "FLEET_SERVER_NUM": str(SERVERS),
        "FLEET_WORKER_NUM": str(workers),
        "FLEET_SERVER_ENDPOINTS": ",".join(endpoints),
        "FLEET_MASTER": f"127.0.0.1:{jobs.free_port()}",
    }
    return [
        {**common, "FLEET_ROLE": role, "FLEET_INDEX": str(index)}
        for role, count in (("worker", workers), ("server", SERVERS))
        for index in range(count)
    ]


def _accuracies(runs: Sequence[jobs.Run]) -> list[float]:
    return [run.results[0]["accuracy"] for run in runs]


def main(argv: Sequence[str] | None = None) -> int:
    """Train everything with every seed and write the result page."""
    options = _parse(argv)
    forked.preload()
    sections = []
    for workers in options.workers:
        sections.append(measured(workers, options))
        print(sections[-1], end="\n\n", flush=True)
    if options.write:
        path = report.write("async_quality", CLAIM, sections)
        print(f"written: {path.relative_to(jobs.ROOT)}")
    return 0


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", required=True, help="folder with MNIST's test files")
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument(
        "--optimizers", nargs="+", choices=list(OPTIMIZERS), default=list(OPTIMIZERS)
    )
    modes = [mode for mode in MODES if mode != SYNC]
    parser.add_argument("--modes", nargs="+", choices=[*modes, *OTHERS], default=modes)
    parser.add_argument("--pixels", choices=("signed", "normal"), default="signed")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--write", action=argparse.BooleanOptionalAction, default=True)
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
