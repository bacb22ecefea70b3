# SPDX-License-Identifier: Apache-2.0
"""ResNet-50 on Flowers-102 with momentum and L2 decay: any number of workers."""

from __future__ import annotations

import argparse

import torch
from model import ResNet50
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, Subset

import fleetlight as fleet
from fleetlight.data import Flowers102

REPORT = "[Epoch %d, batch %d] loss: %.5f, acc1: %.5f, acc5: %.5f"


def say(text: str) -> None:
    if fleet.is_first_worker():
        print(text, flush=True)


def main() -> None:
    args = arguments()
    fleet.init(is_collective=True)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    flowers = Flowers102(
        args.data or "data", size=args.size, augment=args.augment, stand_in=not args.data
    )
    say(f"data: {flowers.name}")

    torch.manual_seed(0)
    model = ResNet50(classes=102).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    records = Subset(flowers, range(args.limit or len(flowers)))
    loader = DataLoader(records, args.batch, shuffle=True, drop_last=True, num_workers=args.readers)
    model = fleet.distributed_model(model)
    optimizer = fleet.distributed_optimizer(optimizer)
    loader = fleet.shard(loader)

    for epoch in range(args.epochs):
        for batch, (x, y) in enumerate(loader):
            x, y = x.to(device), y.to(device)
            logits = model(x)
            loss = F.cross_entropy(logits, y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if batch % 5 == 0:
                mean = fleet.metrics.sum(loss.item()) / fleet.worker_num()
                say(REPORT % (epoch, batch, mean, *(top(k, logits, y) for k in (1, 5))))


def top(k: int, logits: Tensor, labels: Tensor) -> float:
    """The share of records whose label is among the k best scores."""
    hits = (logits.topk(k).indices == labels[:, None]).any(1)
    return fleet.metrics.acc(hits.sum(), len(labels))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", default="", help="folder of Flowers-102 (default: generated)")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--size", type=int, default=224, help="side of the images")
    parser.add_argument("--limit", type=int, default=0, help="number of records (0: all)")
    parser.add_argument("--readers", type=int, default=0, help="processes that decode images")
    parser.add_argument("--augment", action=argparse.BooleanOptionalAction, default=True)
    return parser.parse_args()


if __name__ == "__main__":
    main()
