# SPDX-License-Identifier: Apache-2.0
"""One worker of a job whose quality is measured: trains, tests and reports."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import fleetlight as fleet
from benchmarks.slow_quality_data import TASKS, Example, loss_of, tables
from fleetlight.data.records import TableDataset

#: of the first learning rate, what is left at the end
LAST_RATE = 0.01
#: so many points the curve of the training loss has
BINS = 50


def work(options: Mapping[str, Any]) -> dict[str, Any]:
    """Train, test; what came of it."""
    began, cpu = time.perf_counter(), time.process_time()
    torch.set_num_threads(1)
    task = TASKS[options["task"]]
    settings = {"shared_memory": False, **options["settings"]}
    fleet.init(is_collective=True, strategy=fleet.DistributedStrategy(**settings))
    train, test = tables(options["task"], Path(options["folder"]))
    torch.manual_seed(options["seed"])
    model = task.model()
    optimizer = fleet.distributed_optimizer(task.optimizer(model.parameters()))
    model = fleet.distributed_model(model)
    losses = trained(model, optimizer, train, options)
    # workers that trained alone average
    fleet.barrier_worker()
    seconds = time.perf_counter() - began
    accuracy, loss = tested(model, test)
    fleet.stop_worker()
    return {
        "steps": len(losses),
        "seconds": seconds,
        "cpu_seconds": time.process_time() - cpu,
        "accuracy": accuracy,
        "loss": loss,
        "curve": binned(losses),
        "checksum": float(sum(p.detach().double().abs().sum() for p in model.parameters())),
        "examples": options["epochs"] * len(train),
        "tested": len(test),
        "parameters": sum(p.numel() for p in model.parameters()),
    }


def trained(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    train: TableDataset[Example],
    options: Mapping[str, Any],
) -> list[float]:
    """The loss of every step; the learning rate falls along a cosine."""
    loader = fleet.shard(train.loader(options["batch"], shuffle=True))
    steps = options["epochs"] * len(loader)
    falling = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: (
            LAST_RATE + (1 - LAST_RATE) * 0.5 * (1 + math.cos(math.pi * min(1, step / steps)))
        ),
    )
    losses: list[Tensor] = []
    for epoch in range(options["epochs"]):
        loader.set_epoch(epoch)
        for x, y in loader:
            loss = loss_of(model(x), y)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            falling.step()
            losses.append(loss.detach())
    return torch.stack(losses).tolist()


def binned(losses: list[float]) -> list[float]:
    """Means of adjacent steps, for a readable curve."""
    bins = min(BINS, len(losses))
    return [part.mean().item() for part in torch.tensor(losses).tensor_split(bins)]


@torch.no_grad()
def tested(model: nn.Module, test: TableDataset[Example]) -> tuple[float, float]:
    """Accuracy and loss on records that nobody has trained on."""
    model.eval()
    outputs = [(model(x), y) for x, y in test.loader(500)]
    right = sum(int((out.argmax(-1) == y).sum()) for out, y in outputs)
    count = sum(y.numel() for _, y in outputs)
    return right / count, sum(float(loss_of(out, y)) * y.numel() for out, y in outputs) / count
