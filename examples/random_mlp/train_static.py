# SPDX-License-Identifier: Apache-2.0
"""An MLP (32-1280-1280-2, tanh) on random data with SGD, as a static program with five settings."""

from __future__ import annotations

import argparse

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import fleetlight as fleet
from fleetlight import static
from fleetlight.data import RandomTable


def say(text: str) -> None:
    if fleet.is_first_worker():
        print(text, flush=True)


def main() -> None:
    args = arguments()
    strategy = tuning()
    fleet.init(is_collective=True, strategy=strategy)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    torch.manual_seed(0)
    input_x = static.data("x", [None, 32], torch.float32, device)
    input_y = static.data("y", [None], torch.int64, device)
    model = mlp(args.size).to(device)
    cost = F.cross_entropy(model(input_x), input_y)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    optimizer = fleet.distributed_optimizer(optimizer)
    optimizer.minimize(cost)
    loader = fleet.shard(DataLoader(RandomTable(args.rows), args.batch))

    train_prog = fleet.main_program
    say(train_prog.explain())
    exe = static.Executor(device)
    exe.run(static.default_startup_program())
    for step, batch in enumerate(loader):
        if step % strategy.fetch_frequency == 0:
            (cost_val,) = exe.run(train_prog, feed=batch, fetch_list=[cost.name])
            say(f"step {step} cost {cost_val:.6f}")
        else:
            exe.run(train_prog, feed=batch)


def tuning() -> fleet.DistributedStrategy:
    """Five tuning settings."""
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
