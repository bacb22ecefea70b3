# SPDX-License-Identifier: Apache-2.0
"""One worker of a data-parallel job on CPU: Fleetlight, or torch's DistributedDataParallel."""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

from benchmarks.models import WORKLOADS
from benchmarks.peers import timed


def main() -> None:
    """Train, report, leave."""
    options = timed.arguments("fleetlight", "ddp")
    torch.set_num_threads(1)
    train(options)
    if options.system == "ddp":
        # The model is gone by now: where DDP's reducer outlives the group, freeing it joins a
        # thread of the group's that may be waiting for the interpreter's lock, which we hold.
        dist.destroy_process_group()


def train(options: argparse.Namespace) -> None:
    """What is measured."""
    parallel = {"fleetlight": fleetlight, "ddp": ddp}[options.system]
    plain = WORKLOADS[options.model].model()
    model, optimizer = parallel(plain, WORKLOADS[options.model].optimizer(plain))

    def step(x: torch.Tensor, y: torch.Tensor) -> float:
        loss = cross_entropy(model(x), y)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    rank = dist.get_rank()
    data = [
        (torch.from_numpy(x), torch.from_numpy(y)) for x, y in timed.batches(options.model, rank)
    ]
    timed.train(
        options,
        step,
        data,
        lambda: sum(p.detach().abs().sum().item() for p in plain.parameters()),
        system=f"{options.system}, torch {torch.__version__}",
        rank=rank,
    )
    dist.barrier()


def fleetlight(
    model: nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Ours."""
    import fleetlight as fleet

    fleet.init(is_collective=True)
    return fleet.distributed_model(model), fleet.distributed_optimizer(optimizer)


def ddp(
    model: nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Torch's own."""
    dist.init_process_group("gloo")
    return nn.parallel.DistributedDataParallel(model), optimizer


if __name__ == "__main__":
    main()
