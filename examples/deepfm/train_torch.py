# SPDX-License-Identifier: Apache-2.0
"""DeepFM on click records: plain PyTorch, one process."""

from __future__ import annotations

import argparse
import time

import torch
from model import DeepFM
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, Subset

from fleetlight.data import ClickLog, Criteo


def say(text: str) -> None:
    print(text, flush=True)


def main() -> None:
    args = arguments()
    torch.manual_seed(0)
    model = DeepFM()
    optimizer = torch.optim.Adagrad(model.parameters(), lr=args.lr)
    train(model, optimizer, args)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, args: argparse.Namespace) -> None:
    records, test, best = data(args)
    loader = DataLoader(records, args.batch, shuffle=True, collate_fn=Criteo.collate)
    start, seen = time.perf_counter(), 0
    for epoch in range(args.epochs):
        for step, (dense, ids, label) in enumerate(loader):
            loss = F.binary_cross_entropy_with_logits(model(dense, ids), label)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            seen += len(label)
            if step % args.show_every == 0:
                say(f"epoch {epoch} step {step} loss {loss.item():.4f}")
    speed = seen / (time.perf_counter() - start)

    scores, labels = predictions(model, test)
    reached = auc(scores, labels)
    say(f"AUC {reached:.4f}{best}, training speed {speed:.0f} examples/s")


def data(args: argparse.Namespace) -> tuple[Dataset, Dataset, str]:
    """Records to train and to test on, and the best possible AUC if it is known."""
    if args.data:
        found = Criteo(args.data)
        cut = len(found) * 9 // 10
        return Subset(found, range(cut)), Subset(found, range(cut, len(found))), ""
    test = ClickLog(args.test, start=args.samples)
    return ClickLog(args.samples), test, f" (best possible on generated data: {test.best_auc:.4f})"


@torch.no_grad()
def predictions(model: nn.Module, test: Dataset) -> tuple[Tensor, Tensor]:
    """Scores and labels of the test records."""
    model.eval()
    batches = DataLoader(test, 2048, collate_fn=Criteo.collate)
    pairs = [(model(dense, ids), label) for dense, ids, label in batches]
    scores, labels = zip(*pairs, strict=True)
    return torch.cat(scores), torch.cat(labels)


def auc(scores: Tensor, labels: Tensor) -> float:
    """The probability that a click has a higher score than a record without one."""
    ranks = torch.empty(len(scores), dtype=torch.float64)
    ranks[scores.argsort()] = torch.arange(1, len(scores) + 1, dtype=torch.float64)
    clicks = labels.sum().double()
    above = ranks[labels == 1].sum() - clicks * (clicks + 1) / 2
    return (above / (clicks * (len(labels) - clicks))).item()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", default="", help="Criteo's train.txt (default: generated)")
    parser.add_argument("--samples", type=int, default=200_000, help="records to generate")
    parser.add_argument("--test", type=int, default=50_000, help="records to generate for the test")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--lr", type=float, default=0.02)
    parser.add_argument("--show_every", type=int, default=100, metavar="STEPS")
    return parser.parse_args()


if __name__ == "__main__":
    main()
