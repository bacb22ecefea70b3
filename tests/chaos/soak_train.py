# SPDX-License-Identifier: Apache-2.0
"""Trains on ids that all occur in each epoch, until there is a file `enough`."""

import itertools
import os
from pathlib import Path

import torch

import fleetlight as fleet

IDS, DIM, BATCH = 200_000, 8, 512


class Net(torch.nn.Module):
    """A row for each id, and a dense parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = fleet.nn.SparseEmbedding(DIM)
        self.head = torch.nn.Sequential(
            torch.nn.Linear(DIM, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1)
        )

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(self.rows(ids)).squeeze(-1)
        return found


def main() -> None:
    """Serve, or train."""
    strategy = fleet.DistributedStrategy(
        durability="log", durability_configs={"snapshot_s": 15.0}, a_sync=True, deadline_s=60
    )
    fleet.init(strategy=strategy)
    kind = "server" if fleet.is_server() else "worker"
    index = fleet.server_index() if fleet.is_server() else fleet.worker_index()
    Path(f"pid.{kind}.{index}").write_text(f"{os.getpid()}\n")
    torch.manual_seed(0)
    model = fleet.distributed_model(Net())
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.05)
    optimizer = fleet.distributed_optimizer(optimizer)
    if fleet.is_server():
        fleet.init_server()
        fleet.run_server()
        return
    data = torch.utils.data.TensorDataset(torch.arange(IDS))
    loader = fleet.shard(torch.utils.data.DataLoader(data, BATCH, shuffle=True))
    fleet.init_worker()
    for epoch in itertools.count(loader.epoch):
        for (ids,) in loader:
            loss = (model(ids) - (ids % 7).float()).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        total = fleet.metrics.sum(loss.detach())
        if fleet.is_first_worker():
            print(f"epoch {epoch}: loss {float(total):.4f}", flush=True)
        is_enough = torch.tensor([float(Path("enough").exists())])
        if fleet.all_reduce(is_enough, "min").item():
            break
    fleet.stop_worker()


if __name__ == "__main__":
    main()
