# SPDX-License-Identifier: Apache-2.0
"""An MLP (784-128-128-10, tanh) on MNIST with Adam: any number of workers."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, Subset

import fleetlight as fleet
from fleetlight.data import MNIST


def say(text: str) -> None:
    if fleet.is_first_worker():
        print(text, flush=True)


def main() -> None:
    args = arguments()
    fleet.init(is_collective=True)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    train, test = mnist(args.data, True), mnist(args.data, False)
    say(f"data: {train.name} and {test.name}")

    torch.manual_seed(0)
    model = mlp().to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.001)
    train_loader = DataLoader(first(train, args.limit), args.batch, shuffle=True)
    model = fleet.distributed_model(model)
    optimizer = fleet.distributed_optimizer(optimizer)
    train_loader = fleet.shard(train_loader)

    start, seen = time.perf_counter(), 0
    for epoch in range(args.epochs):
        for step, (x, y) in enumerate(train_loader):
            x, y = x.to(device), y.to(device)
            logits = model(x)
            loss = F.cross_entropy(logits, y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            seen += len(y)
            if step % args.show_every == 0:
                acc = (logits.argmax(1) == y).sum().item() / len(y)
                say(f"epoch {epoch} step {step} loss {loss:.5f} acc {acc:.4f}")
    speed = fleet.metrics.sum(seen) / (time.perf_counter() - start)

    part = first(test, args.limit)
    part = Subset(part, range(fleet.worker_index(), len(part), fleet.worker_num()))
    correct = count_correct(model, DataLoader(part, 1000), device)
    acc = fleet.metrics.acc(correct, len(part))
    say(f"test accuracy {acc:.4f}, training speed {speed:.0f} examples/s")

    fleet.save_persistables(args.out / "checkpoint")
    fleet.save_inference_model(args.out / "inference", x[:2])
    say(f"saved checkpoint and inference in {args.out}")


def mnist(folder: str, train: bool) -> MNIST:
    """MNIST from `folder`; without one, generated images that say so in their name."""
    return MNIST(folder or "data", train, stand_in=not folder)


def first(dataset: Dataset, count: int) -> Dataset:
    """The first `count` records; 0: all."""
    return Subset(dataset, range(count or len(dataset)))


def mlp() -> nn.Sequential:
    return nn.Sequential(
        nn.Flatten(),
        *(nn.Linear(784, 128), nn.Tanh()),
        *(nn.Linear(128, 128), nn.Tanh()),
        nn.Linear(128, 10),
    )


@torch.no_grad()
def count_correct(model: nn.Module, loader: DataLoader, device: torch.device) -> int:
    model.eval()
    return sum(int((model(x.to(device)).argmax(1).cpu() == y).sum()) for x, y in loader)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", default="", help="folder of the idx files (default: generated)")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--limit", type=int, default=0, help="number of records (0: all)")
    parser.add_argument("--show_every", type=int, default=100, metavar="STEPS")
    parser.add_argument("--out", type=Path, default=Path("output/mnist_mlp"))
    return parser.parse_args()


if __name__ == "__main__":
    main()
