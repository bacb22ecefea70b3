# SPDX-License-Identifier: Apache-2.0
"""ResNet-50 on Flowers-102 with momentum and L2 decay, as a static program."""

from __future__ import annotations

import argparse

import torch
from model import ResNet50
from torch.nn import functional as F
from torch.utils.data import DataLoader, Subset

import fleetlight as fleet
from fleetlight import static
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
    image = static.data("x", [None, 3, args.size, args.size], torch.float32, device)
    label = static.data("y", [None], torch.int64, device)
    model = ResNet50(classes=102).to(device)
    out = model(image)
    avg_cost = F.cross_entropy(out, label)
    acc_top1 = static.accuracy(out, label, k=1)
    acc_top5 = static.accuracy(out, label, k=5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    optimizer = fleet.distributed_optimizer(optimizer)
    optimizer.minimize(avg_cost)
    records = Subset(flowers, range(args.limit or len(flowers)))
    loader = DataLoader(records, args.batch, shuffle=True, drop_last=True, num_workers=args.readers)
    loader = static.bind(fleet.shard(loader), [image, label])

    exe = static.Executor(device)
    exe.run(static.default_startup_program())
    say(fleet.main_program.explain())
    fetches = [avg_cost.name, acc_top1.name, acc_top5.name]
    for epoch in range(args.epochs):
        for batch, data in enumerate(loader):
            found = exe.run(static.default_main_program(), feed=data, fetch_list=fetches)
            if batch % 5 == 0:
                means = (fleet.metrics.sum(one.item()) / fleet.worker_num() for one in found)
                say(REPORT % (epoch, batch, *means))


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
