# SPDX-License-Identifier: Apache-2.0
"""The MLP on MNIST with Adam, on parameter servers, as a static program."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, Subset

import fleetlight as fleet
from fleetlight import static
from fleetlight.data import MNIST


def say(text: str) -> None:
    if fleet.is_first_worker():
        print(text, flush=True)


def main() -> None:
    args = arguments()
    fleet.init()
    strategy = fleet.DistributedStrategy(a_sync=True)
    torch.manual_seed(0)
    x = static.data("x", [None, 1, 28, 28], torch.float32)
    y = static.data("y", [None], torch.int64)
    model = mlp()
    logits = model(x)
    logits.name = "logits"
    cost, acc = F.cross_entropy(logits, y), static.accuracy(logits, y)
    acc.name = "acc"
    optimizer = torch.optim.Adam(model.parameters(), lr=0.001)
    optimizer = fleet.distributed_optimizer(optimizer, strategy)
    optimizer.minimize(cost)
    if fleet.is_server():
        fleet.init_server()
        fleet.run_server()
    else:
        exe = static.Executor("cpu")
        exe.run(static.default_startup_program())
        fleet.init_worker()
        work(exe, args)
        fleet.stop_worker()


def work(exe: static.Executor, args: argparse.Namespace) -> None:
    """What workers do: train, test, save."""
    main, test_program = static.default_main_program(), static.default_main_program().clone(True)
    train, test = mnist(args.data, True), mnist(args.data, False)
    say(f"data: {train.name} and {test.name}")
    train_loader = fleet.shard(DataLoader(first(train, args.limit), args.batch, shuffle=True))

    start, seen = time.perf_counter(), 0
    for epoch in range(args.epochs):
        for step, batch in enumerate(train_loader):
            loss, share = exe.run(main, feed=batch, fetch_list=["loss", "acc"])
            seen += len(batch[1])
            if step % args.show_every == 0:
                say(f"epoch {epoch} step {step} loss {loss:.5f} acc {share:.4f}")
    fleet.barrier_worker()
    speed = fleet.metrics.sum(seen) / (time.perf_counter() - start)

    part = first(test, args.limit)
    part = Subset(part, range(fleet.worker_index(), len(part), fleet.worker_num()))
    correct = 0
    for images, labels in DataLoader(part, 1000):
        (scores,) = exe.run(test_program, feed={"x": images}, fetch_list=["logits"])
        correct += int((scores.argmax(1) == labels).sum())
    share = fleet.metrics.acc(correct, len(part))
    say(f"test accuracy {share:.4f}, training speed {speed:.0f} examples/s")
    fleet.save_inference_model(args.out / "inference", ["x"], ["logits"], program=test_program)
    say(f"saved inference in {args.out}")


def mnist(folder: str, train: bool) -> MNIST:
    """MNIST from `folder`; without one, generated images that say so in their name."""
    return MNIST(folder or "data", train, stand_in=not folder)


def first(dataset: Dataset, count: int) -> Dataset:
    """The first `count` records; 0: all."""
    return Subset(dataset, range(count or len(dataset)))


def mlp() -> nn.Sequential:
    return nn.Sequential(
        # values are stale here: images around 0 make a model that tolerates it
        nn.LayerNorm((1, 28, 28), elementwise_affine=False),
        nn.Flatten(),
        *(nn.Linear(784, 128), nn.Tanh()),
        *(nn.Linear(128, 128), nn.Tanh()),
        nn.Linear(128, 10),
    )


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
