# SPDX-License-Identifier: Apache-2.0
"""A collective script as a user writes it, which also prints its role."""

import sys

import torch
from torch import nn

import fleetlight as fleet


def main() -> None:
    """Train with hierarchical all-reduce; print the roles and the sum of the parameters."""
    fleet.init(is_collective=True)
    torch.manual_seed(fleet.worker_index())
    plain = nn.Linear(8, 8).double()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    model = fleet.distributed_model(plain)
    strategy = fleet.DistributedStrategy(use_hierarchical_allreduce=True)
    optimizer = fleet.distributed_optimizer(optimizer, strategy)
    inputs = torch.arange(64.0).double().view(8, 8) / 64
    for _ in range(3):
        optimizer.zero_grad()
        # equal numbers of records for all workers would hide a mean over hosts
        model(inputs[fleet.worker_index() :]).square().mean().backward()
        optimizer.step()
    index = fleet.worker_index()
    address = fleet.worker_endpoints()[index].partition(":")[0]
    total = sum(float(p.detach().abs().sum()) for p in plain.parameters())
    who = f"{index}/{fleet.worker_num()} {fleet.local_rank()}/{fleet.node_num()} {address}"
    # One write with its newline: unbuffered, print() would let two workers mix within a line.
    sys.stdout.write(f"RESULT {who} {total:.12f}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
