# SPDX-License-Identifier: Apache-2.0
"""A script as a user writes it, which the tests start with every launcher."""

import os
import signal
import sys

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import fleetlight as fleet

GLOBAL_BATCH, EPOCHS = 32, 3


def accident(what: str) -> None:
    """The error of worker 1 in the second epoch."""
    if what == "raise":
        raise ValueError("on purpose")
    if what == "exit":
        sys.exit(3)
    if what == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)


def main(what: str) -> None:
    """Train a small network and print the sum of its parameters."""
    fleet.init(is_collective=True)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 64), nn.Tanh(), nn.Linear(64, 2)).double()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    model = fleet.distributed_model(model)
    optimizer = fleet.distributed_optimizer(optimizer)
    x = torch.randn(200, 20, generator=torch.Generator().manual_seed(1)).double()
    records = TensorDataset(x, (x.sum(1) > 0).long())
    batch = GLOBAL_BATCH // fleet.worker_num()
    loader = fleet.shard(DataLoader(records, batch_size=batch, shuffle=True))
    for epoch in range(EPOCHS):
        for inputs, labels in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
        if epoch == 1 and fleet.worker_index() == 1:
            accident(what)
    total = sum(float(p.detach().abs().sum()) for p in model.parameters())
    # One write with its newline: unbuffered, print() would let two workers mix within a line.
    sys.stdout.write(f"RESULT {fleet.worker_index()} {fleet.worker_num()} {total:.10f}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "")
