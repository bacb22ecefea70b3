# SPDX-License-Identifier: Apache-2.0
"""ResNet-50 on CIFAR-10 with momentum, on the CPU: plain PyTorch, one process."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader

from fleetlight.data import CIFAR10

sys.path.append(str(Path(__file__).resolve().parents[1] / "resnet50"))  # the model of that example
from model import ResNet50


def main() -> None:
    args = arguments()
    resize = args.size if args.size != 32 else None
    images = CIFAR10(
        args.data or "data",
        augment=args.augment,
        resize=resize,
        normalise=True,
        stand_in=not args.data,
    )

    torch.manual_seed(0)
    model = ResNet50(classes=10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    loader = DataLoader(images, args.batch, shuffle=True, drop_last=True)

    for epoch in range(1, args.epochs + 1):
        for step, (x, y) in enumerate(loader, start=1):
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            print(f"epoch: {epoch} step: {step}, loss is {loss.item():.7f}", flush=True)
            if step == args.steps:
                break
    print(f"finished training on {images.name}", flush=True)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", default="", help="folder of CIFAR-10 (default: generated)")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--steps", type=int, default=0, help="steps per epoch (0: all)")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--size", type=int, default=224, help="side of the resized images")
    parser.add_argument("--augment", action=argparse.BooleanOptionalAction, default=True)
    return parser.parse_args()


if __name__ == "__main__":
    main()
