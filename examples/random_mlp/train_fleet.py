# SPDX-License-Identifier: Apache-2.0
"""An MLP (32-1280-1280-2, tanh) on random data with SGD, and five tuning settings."""

from __future__ import annotations

import argparse

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import fleetlight as fleet
from fleetlight.data import RandomTable


def say(text: str) -> None:
    if fleet.is_first_worker():
        print(text, flush=True)


def main() -> None:
    args = arguments()
    strategy = tuning()
    fleet.init(is_collective=True, strategy=strategy)
    say(strategy.explain())
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    torch.manual_seed(0)
    model = mlp(args.size).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = DataLoader(RandomTable(args.rows), args.batch)
    model = fleet.distributed_model(model)
    optimizer = fleet.distributed_optimizer(optimizer)
    loader = fleet.shard(loader)

    for step, (x, y) in enumerate(loader):
        x, y = x.to(device), y.to(device)
        cost = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        cost.backward()
        optimizer.step()
        if step % strategy.fetch_frequency == 0:
            say(f"step {step} cost {cost.item():.6f}")


def tuning() -> fleet.DistributedStrategy:
    """Five tuning settings; `explain()` says what each of them does in this job."""
    strategy = fleet.DistributedStrategy()
    strategy.nccl_comm_num = 2
    strategy.fuse_all_reduce_ops = True
    strategy.exec_strategy.num_threads = 3
    strategy.exec_strategy.num_iteration_per_drop_scope = 30
    strategy.fetch_frequency = 2
    return strategy


def mlp(size: int) -> nn.Sequential:
    return nn.Sequential(
        *(nn.Linear(32, size), nn.Tanh()),
        *(nn.Linear(size, size), nn.Tanh()),
        nn.Linear(size, 2),
    )


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=12_800)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--size", type=int, default=1280, help="width of the hidden layers")
    return parser.parse_args()


if __name__ == "__main__":
    main()
