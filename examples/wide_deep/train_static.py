# SPDX-License-Identifier: Apache-2.0
"""Wide&Deep on click records, as a static program: parameter servers in any mode."""

from __future__ import annotations

import argparse
import time

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, Subset

import fleetlight as fleet
from fleetlight import static
from fleetlight.data import ClickLog, Criteo

#: the modes differ in one field of the strategy
MODES = {
    "sync": {"a_sync": False},
    "async": {"a_sync": True},
    "ssp": {"a_sync": True, "a_sync_configs": {"staleness": 4}},
    "geo": {"a_sync": True, "a_sync_configs": {"k_steps": 100}},
}


class WideDeep(nn.Module):
    """Log-odds of a click: a weight for each id and number, plus an MLP over vectors of the ids."""

    def __init__(self, fields: int = 26, numbers: int = 13, dim: int = 9, width: int = 400) -> None:
        super().__init__()
        self.wide = fleet.nn.SparseEmbeddingBag(1, "sum", initializer="zeros")
        self.deep = fleet.nn.SparseEmbedding(dim)
        self.linear = nn.Linear(numbers, 1)
        self.mlp = nn.Sequential(
            *(nn.Linear(fields * dim + numbers, width), nn.ReLU()),
            *(nn.Linear(width, width), nn.ReLU()),
            *(nn.Linear(width, width), nn.ReLU()),
            nn.Linear(width, 1),
        )

    def forward(self, dense: Tensor, ids: Tensor) -> Tensor:
        wide = self.wide(ids) + self.linear(dense)
        deep = self.mlp(torch.cat([self.deep(ids).flatten(1), dense], dim=1))
        return (wide + deep).squeeze(1)


def say(text: str) -> None:
    if fleet.is_first_worker():
        print(text, flush=True)


def main() -> None:
    args = arguments()
    fleet.init()
    strategy = fleet.DistributedStrategy(**MODES[args.mode])
    torch.manual_seed(0)
    dense = static.data("dense", [None, 13], torch.float32)
    ids = static.data("ids", [None, 26], torch.int64)
    label = static.data("label", [None], torch.float32)
    model = WideDeep()
    score = model(dense, ids)
    score.name = "score"
    cost = F.binary_cross_entropy_with_logits(score, label)
    optimizer = fleet.distributed_optimizer(optimizer_of(model, args), strategy)
    optimizer.minimize(cost)
    if fleet.is_server():
        fleet.init_server()
        fleet.run_server()
    else:
        exe = static.Executor("cpu")
        exe.run(static.default_startup_program())
        fleet.init_worker()
        train(exe, args)
        fleet.stop_worker()


def train(exe: static.Executor, args: argparse.Namespace) -> None:
    main, evaluation = static.default_main_program(), static.default_main_program().clone(True)
    records, test, best = data(args)
    loader = DataLoader(records, args.batch, shuffle=True, collate_fn=Criteo.collate)
    reader = static.bind(fleet.shard(loader), ["dense", "ids", "label"], main)
    start, seen = time.perf_counter(), 0
    for epoch in range(args.epochs):
        reader.start()
        step = 0
        try:
            while True:
                (loss,) = exe.run(main, fetch_list=["loss"])
                if step % args.show_every == 0:
                    say(f"epoch {epoch} step {step} loss {loss:.4f}")
                step += 1
        except static.EndOfData:
            reader.reset()
        seen += step * args.batch
    fleet.barrier_worker()
    speed = fleet.metrics.sum(seen) / (time.perf_counter() - start)

    test = Subset(test, range(fleet.worker_index(), len(test), fleet.worker_num()))
    scores, labels = predictions(exe, evaluation, test)
    reached = fleet.metrics.auc(scores, labels)
    say(f"AUC {reached:.4f}{best}, training speed {speed:.0f} examples/s")


def data(args: argparse.Namespace) -> tuple[Dataset, Dataset, str]:
    """Records to train and to test on, and the best possible AUC if it is known."""
    if args.data:
        found = Criteo(args.data)
        cut = len(found) * 9 // 10
        return Subset(found, range(cut)), Subset(found, range(cut, len(found))), ""
    test = ClickLog(args.test, start=args.samples)
    return ClickLog(args.samples), test, f" (best possible on generated data: {test.best_auc:.4f})"


def optimizer_of(model: nn.Module, args: argparse.Namespace) -> torch.optim.Optimizer:
    kind = {"adagrad": torch.optim.Adagrad, "sgd": torch.optim.SGD}[args.optimizer]
    return kind(model.parameters(), lr=args.lr)


def predictions(
    exe: static.Executor, program: static.Program, test: Dataset
) -> tuple[Tensor, Tensor]:
    """Scores and labels of the test records."""
    scores, labels = [], []
    for dense, ids, label in DataLoader(test, 2048, collate_fn=Criteo.collate):
        scores += exe.run(program, feed={"dense": dense, "ids": ids}, fetch_list=["score"])
        labels.append(label)
    return torch.cat(scores), torch.cat(labels)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mode", choices=sorted(MODES), default="async")
    parser.add_argument("--data", default="", help="Criteo's train.txt (default: generated)")
    parser.add_argument("--samples", type=int, default=400_000, help="records to generate")
    parser.add_argument("--test", type=int, default=50_000, help="records to generate for the test")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--optimizer", choices=["adagrad", "sgd"], default="adagrad")
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--show_every", type=int, default=100, metavar="STEPS")
    return parser.parse_args()


if __name__ == "__main__":
    main()
