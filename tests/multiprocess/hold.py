# SPDX-License-Identifier: Apache-2.0
"""A script that pauses within its training, so that a test can examine the job.

Each process writes its token into its own file and continues once there is a file `go`. Worker 1
then fails if that file says so. With `--collective` there are no servers.
"""

import json
import os
import sys
import time
from pathlib import Path

import torch
from torch import nn

import fleetlight as fleet
from fleetlight.fleet.job import current

LIMIT_S = 100.0


class Model(nn.Module):
    """Rows of three ids into a linear layer."""

    def __init__(self, *, served: bool) -> None:
        super().__init__()
        self.emb: nn.Module = fleet.nn.SparseEmbedding(4) if served else nn.Embedding(40, 4)
        self.linear = nn.Linear(12, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.linear(self.emb(ids).flatten(1))
        return out


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """One step on fixed ids."""
    optimizer.zero_grad()
    model(torch.arange(12).reshape(4, 3)).sum().backward()
    optimizer.step()


def write_report() -> None:
    """Print the role and the strategy, and write down process id and token."""
    role = current().role
    sys.stdout.write(f"{role!r}\n{current().strategy!r}\n")
    sys.stdout.flush()
    report = {"pid": os.getpid(), "token": os.environ.get("FLEET_TOKEN")}
    fresh = Path(f"{role.kind.value}.{role.index}.new")
    fresh.write_text(json.dumps(report))
    fresh.replace(fresh.with_suffix(".json"))


def go() -> str:
    """Wait for the file `go`, and return its text."""
    file, end = Path("go"), time.monotonic() + LIMIT_S
    while not file.exists():
        assert time.monotonic() < end, "there is no file go"
        time.sleep(0.02)
    return file.read_text()


def main() -> None:
    """Serve, or train, wait, and train again."""
    collective = "--collective" in sys.argv
    fleet.init(is_collective=collective, strategy=fleet.DistributedStrategy(deadline_s=60))
    plain = Model(served=not collective)
    optimizer = fleet.distributed_optimizer(torch.optim.Adagrad(plain.parameters(), lr=0.1))
    model = fleet.distributed_model(plain)
    write_report()
    if fleet.is_server():
        fleet.init_server()
        fleet.run_server()
        return
    fleet.init_worker()
    step(model, optimizer)
    Path(f"trained.{fleet.worker_index()}").write_text("\n")
    if "fail" in go() and fleet.worker_index() == 1:
        raise ValueError("on purpose")
    step(model, optimizer)


if __name__ == "__main__":
    main()
