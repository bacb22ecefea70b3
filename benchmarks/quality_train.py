# SPDX-License-Identifier: Apache-2.0
"""One process of a job whose quality is measured: plain torch, or Fleetlight's worker or server.

Plain torch reads the blocks of records that the workers share, with the same first values.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.utils.data import Subset

from benchmarks import jobs
from benchmarks.quality_models import Task, task
from fleetlight.data import Record, ShardLoader
from fleetlight.data.records import BatchedDataset
from fleetlight.observe import metrics

OPTIMIZERS = {"adagrad": torch.optim.Adagrad, "sgd": torch.optim.SGD}


def main() -> None:
    """Train, test, report."""
    options = _parse()
    torch.set_num_threads(1)
    torch.manual_seed(options.seed)
    {"torch": plain_torch, "fleetlight": fleetlight}[options.system](options)


def plain_torch(options: argparse.Namespace) -> None:
    """One process, whose batch is that of all workers together."""
    records = task(options.task, options.data, options.seed, options.samples)
    model = records.model()
    optimizer = optimizer_of(model, options)
    loader: ShardLoader[Any] = ShardLoader(
        records.train.loader(options.batch * options.workers, shuffle=True),
        worker=0,
        workers=1,
        seed=options.seed,
        tail="join",
    )
    seconds = train(model, optimizer, loader, options.epochs)
    scores, labels = predictions(model, records.test, 0, 1)
    reached = metrics.auc(scores, labels, lambda mine, op: mine, lambda mine: [mine])
    report(options, records, reached, seconds)


def fleetlight(options: argparse.Namespace) -> None:
    """Ours: a server serves, a worker trains."""
    import fleetlight as fleet

    fleet.init()
    strategy = fleet.DistributedStrategy(
        a_sync=options.mode != "sync",
        a_sync_configs={
            "k_steps": options.k_steps if options.mode == "geo" else 0,
            "table_wire": options.table_wire,
            "table_dtype": options.table_dtype,
        },
        seed=options.seed,
    )
    records = task(options.task, options.data, options.seed, options.samples)
    model = records.model()
    optimizer = optimizer_of(model, options)
    model = fleet.distributed_model(model)
    optimizer = fleet.distributed_optimizer(optimizer, strategy)
    if fleet.is_server():
        fleet.init_server()
        fleet.run_server()
        return
    fleet.init_worker()
    loader = fleet.shard(records.train.loader(options.batch, shuffle=True), deal=options.deal)
    marks = Marks(Path(options.marks), fleet.worker_index()) if options.marks else None
    seconds = train(model, optimizer, loader, options.epochs, marks)
    fleet.barrier_worker()
    # with a queue, workers may have left: each tests on everything
    share = (0, 1) if options.deal == "queue" else (fleet.worker_index(), fleet.worker_num())
    scores, labels = predictions(model, records.test, *share)
    reached = fleet.metrics.auc(scores, labels)
    if fleet.is_first_worker():
        report(options, records, reached, seconds)
    fleet.stop_worker()


class Marks:
    """Files by which the workers and the process that starts them wait for each other."""

    def __init__(self, folder: Path, worker: int) -> None:
        self._folder, self._worker = folder, worker

    def ready(self) -> None:
        """This worker is about to train."""
        (self._folder / f"ready.{self._worker}").touch()

    def epoch(self, number: int) -> None:
        """Wait before an epoch until the workers are those that are to train."""
        if self._worker == 0:
            (self._folder / f"epoch.{number}").touch()
        while not (self._folder / f"go.{number}").exists():
            time.sleep(0.01)


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loader: ShardLoader[Any],
    epochs: int,
    marks: Marks | None = None,
) -> float:
    """Seconds of all epochs."""
    began = time.perf_counter()
    if marks is not None:
        marks.ready()
    for epoch in range(loader.epoch, epochs):
        if marks is not None:
            marks.epoch(epoch)
        for dense, ids, label in loader:
            loss = binary_cross_entropy_with_logits(model(dense, ids), label)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    return time.perf_counter() - began


@torch.no_grad()
def predictions(
    model: nn.Module, test: BatchedDataset[Record], worker: int, workers: int
) -> tuple[Tensor, Tensor]:
    """Scores and labels of this worker's share of the test."""
    model.eval()
    mine = Subset(test, range(worker, len(test), workers))
    batches = torch.utils.data.DataLoader(mine, 4096, collate_fn=test.collate)
    pairs = [(model(dense, ids), label) for dense, ids, label in batches]
    scores, labels = zip(*pairs, strict=True)
    return torch.cat(scores), torch.cat(labels)


def optimizer_of(model: nn.Module, options: argparse.Namespace) -> torch.optim.Optimizer:
    """One for tables and dense parameters alike."""
    made: torch.optim.Optimizer = OPTIMIZERS[options.optimizer](model.parameters(), lr=options.lr)
    return made


def report(options: argparse.Namespace, records: Task, reached: float, seconds: float) -> None:
    """Print the line the harness reads."""
    jobs.result(
        auc=reached,
        best_auc=records.best_auc,
        seconds=seconds,
        examples=options.epochs * len(records.train),
        tested=len(records.test),
        rows=records.rows,
        records=records.train.name,
    )


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--system", choices=("torch", "fleetlight"), required=True)
    parser.add_argument("--task", choices=("adult", "movielens", "clicks"), required=True)
    parser.add_argument("--data", default="", help="folder of the real records")
    parser.add_argument("--mode", choices=("sync", "async", "geo"), default="sync")
    parser.add_argument("--k_steps", type=int, default=20)
    parser.add_argument("--table_wire", default="fp32", help="fp32, bf16, fp16 or int8")
    parser.add_argument("--table_dtype", default="fp32", help="fp32 or bf16")
    parser.add_argument("--deal", choices=("blocks", "queue"), default="blocks")
    parser.add_argument("--marks", default="", help="a folder for files that pace the epochs")
    parser.add_argument("--workers", type=int, default=2, help="whose batches torch puts together")
    parser.add_argument("--batch", type=int, default=128, help="of each worker")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--samples", type=int, default=400_000, help="of the generated log")
    parser.add_argument("--optimizer", choices=sorted(OPTIMIZERS), default="adagrad")
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    main()
