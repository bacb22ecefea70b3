# SPDX-License-Identifier: Apache-2.0
"""Trains on click records, and publishes the newest model each few seconds.

fleetrun --server_num 1 --worker_num 2 examples/serving/train.py --out shared
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import fleetlight as fleet
from fleetlight.data import ClickLog, Criteo


class Clicks(nn.Module):
    """The probability of a click: an MLP over vectors of the ids, and numbers."""

    def __init__(self, fields: int = 26, numbers: int = 13, dim: int = 8) -> None:
        super().__init__()
        self.ids = fleet.nn.SparseEmbedding(dim)
        self.mlp = nn.Sequential(nn.Linear(fields * dim + numbers, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, numbers: Tensor, ids: Tensor) -> Tensor:
        inputs = torch.cat([self.ids(ids).flatten(1), numbers], dim=1)
        return torch.sigmoid(self.mlp(inputs)).squeeze(1)


def main() -> None:
    args = arguments()
    fleet.init()
    torch.manual_seed(0)
    model = Clicks()
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.02)
    model = fleet.distributed_model(model)
    optimizer = fleet.distributed_optimizer(optimizer, fleet.DistributedStrategy(a_sync=True))
    if fleet.is_server():
        fleet.init_server()
        fleet.run_server()
        return
    fleet.init_worker()
    records = ClickLog(args.samples)
    loader = DataLoader(records, args.batch, shuffle=True, collate_fn=Criteo.collate)
    loader = fleet.shard(loader)
    numbers, ids, _ = Criteo.collate([records[0], records[1]])
    # the program takes its rows and dense values from what is published
    fleet.save_inference_model(args.out / "program", (numbers, ids), rows="reader")
    fleet.publish(args.out / "rows", every_s=args.every_s)
    for epoch in range(args.epochs):
        for step, (numbers, ids, label) in enumerate(loader):
            loss = F.binary_cross_entropy(model(numbers, ids), label)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step % 100 == 0 and fleet.is_first_worker():
                print(f"epoch {epoch} step {step} loss {loss.item():.4f}", flush=True)
    fleet.stop_worker()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("shared"), help="read by serve.py")
    parser.add_argument("--every_s", type=float, default=10.0)
    parser.add_argument("--samples", type=int, default=400_000)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch", type=int, default=256)
    return parser.parse_args()


if __name__ == "__main__":
    main()
