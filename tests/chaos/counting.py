# SPDX-License-Identifier: Apache-2.0
"""Counts, where others learn: a row is the number of times that its id was pushed.

Every worker knows what it has pushed; at the end all rows must say the same, not one more or less.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

import torch
from tests.chaos.doom import Doom

import fleetlight as fleet
from fleetlight.fleet.context import current

IDS, BATCH, TURN = 64, 24, 25
MODES: dict[str, dict[str, object]] = {
    "sync": {},
    "async": {"a_sync": True},
    "ssp": {"a_sync": True, "a_sync_configs": {"staleness": 3}},
    "geo": {"a_sync": True, "a_sync_configs": {"k_steps": 5}},
}


class Counter(torch.nn.Module):
    """One number for each id, and one for the number of batches."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = fleet.nn.SparseEmbedding(1, initializer="zeros")
        self.batches = torch.nn.Parameter(torch.zeros(1))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.rows(ids).sum() + self.batches.sum()


def main() -> int:
    """Serve, or count until there is a file called `enough`; 0 where nothing is lost or doubled."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--mode", choices=MODES, default="async")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--snapshot_s", type=float, default=1.0)
    parser.add_argument("--doomed", action="store_true", help="servers die at the worst moments")
    options = parser.parse_args()
    strategy = fleet.DistributedStrategy(
        durability="log",
        durability_configs={"snapshot_s": options.snapshot_s},
        deadline_s=60,
        **MODES[options.mode],
    )
    fleet.init(strategy=strategy)
    model = fleet.distributed_model(Counter())
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=1.0))
    if fleet.is_server():
        if options.doomed and not Path("enough").exists():
            Doom(f"{options.seed} {fleet.server_index()} {_life()}").come_over()
        fleet.init_server()
        Path(f"pid.server.{fleet.server_index()}").write_text(f"{os.getpid()}\n")
        fleet.run_server()
        return 0
    fleet.init_worker()
    return _count(model, optimizer, options)


def _life() -> int:
    """Each has a moment of its own to die at."""
    path = Path(f"life.server.{fleet.server_index()}")
    life = 1 + (int(path.read_text()) if path.exists() else 0)
    path.write_text(str(life))
    return life


class Sent:
    """What a worker of GeoSGD has sent: of its progress it keeps a part and sends it later."""

    def __init__(self) -> None:
        self.rows = torch.zeros(IDS, dtype=torch.float64)
        session = current().session
        assert session is not None
        self._exchange = session.client.exchange
        session.client.exchange = self  # type: ignore[method-assign, assignment]

    def __call__(self, tables: Any, blocks: Any, **more: Any) -> Any:
        for part in tables.values():
            values = torch.from_numpy(part.gradients[:, 0].astype("float64"))
            self.rows.index_add_(0, torch.from_numpy(part.ids), values)
        return self._exchange(tables, blocks, **more)


def _count(model: Counter, optimizer: torch.optim.Optimizer, options: argparse.Namespace) -> int:
    drawn = torch.Generator().manual_seed(1000 * options.seed + fleet.worker_index())
    pushed, batches = torch.zeros(IDS), 0
    sent = Sent() if options.mode == "geo" else None
    while True:
        for _ in range(TURN):
            ids = torch.randint(IDS, (BATCH,), generator=drawn)
            optimizer.zero_grad()
            (-model(ids)).backward()
            optimizer.step()
            pushed += torch.bincount(ids, minlength=IDS)
            batches += 1
        # all stop behind the same turn
        is_enough = torch.tensor([float(Path("enough").exists())])
        if fleet.all_reduce(is_enough, "min").item():
            break
    fleet.barrier_worker()
    with torch.no_grad():
        found = torch.cat([model.rows(torch.arange(IDS)).flatten(), model.batches])
    mine = torch.cat([pushed, torch.tensor([float(batches)])])
    if options.mode == "sync":
        # the mean of the workers' gradients
        mine /= fleet.worker_num()
    if sent is not None:
        mine, found = sent.rows, found[:-1]
    more = found - fleet.all_reduce(mine)
    # where halves of halves are sent, something is rounded
    more[more.abs() < 0.01] = 0
    lost, doubled = -more.clamp(max=0).sum().item(), more.clamp(min=0).sum().item()
    told = f"COUNTED {int(pushed.sum())} lost {lost:g} doubled {doubled:g}"
    sys.stdout.write(f"{told}\n")
    sys.stdout.flush()
    return int(bool(lost or doubled))


if __name__ == "__main__":
    code = main()
    if code:
        sys.exit(code)
