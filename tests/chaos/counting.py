# SPDX-License-Identifier: Apache-2.0
"""Counts, where others learn: a row is the number of times that its id was pushed.

Each epoch brings every record once, whoever reads it; at the end all rows must say so, and be not
one more or less. GeoSGD sends a part of what it has learned: there, what was sent is counted.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from tests.chaos import harms
from tests.chaos.doom import Doom

import fleetlight as fleet
from fleetlight.fleet.job import current

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
    options = _parsed()
    strategy = fleet.DistributedStrategy(
        durability="log",
        durability_configs={"snapshot_s": options.snapshot_s},
        checkpoint_configs={"every_steps": options.every_steps},
        deadline_s=60,
        **MODES[options.mode],
    )
    fleet.init(strategy=strategy)
    kind = "server" if fleet.is_server() else "worker"
    number = fleet.server_index() if fleet.is_server() else fleet.worker_index()
    harms.come_over(options.harms, f"{options.seed} {kind} {number} {os.getpid()}")
    doom = None
    if kind in options.doomed and not Path("enough").exists():
        life = _life(kind, number)
        doom = Doom(f"{options.seed} {kind} {number} {life}")
        if life > 1:
            doom.come_over()
    model = fleet.distributed_model(Counter())
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=1.0))
    if fleet.is_server():
        fleet.init_server()
        _begin(kind, number, doom)
        fleet.run_server()
        return 0
    return _count(model, optimizer, options, doom)


def _parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--mode", choices=MODES, default="async")
    parser.add_argument("--deal", choices=("blocks", "queue"), default="blocks")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--snapshot_s", type=float, default=1.0)
    parser.add_argument("--every_steps", type=int, default=0, help="between two checkpoints")
    parser.add_argument("--doomed", nargs="*", default=[], help="kinds that die at bad moments")
    parser.add_argument("--harms", nargs="*", choices=harms.HARMS, default=[])
    return parser.parse_args()


def _life(kind: str, number: int) -> int:
    """Each has a moment of its own to die at."""
    path = Path(f"life.{kind}.{number}")
    life = 1 + (int(path.read_text()) if path.exists() else 0)
    path.write_text(str(life))
    return life


def _begin(kind: str, number: int, doom: Doom | None) -> None:
    """Tell whoever kills from outside that this process is at work.

    From then on it may die in its first life, too: before, all begin again, and count anew.
    """
    Path(f"pid.{kind}.{number}").write_text(f"{os.getpid()}\n")
    if doom is not None:
        doom.come_over()


class Sent:
    """What a worker of GeoSGD has sent, over all its lives.

    What has left is never made again; what has not is made again under the same numbers.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        session = current().session
        assert session is not None
        self._client = session.client
        self._exchange = session.client.exchange
        session.client.exchange = self  # type: ignore[method-assign, assignment]

    def __call__(self, tables: Any, blocks: Any, **more: Any) -> Any:
        rows = [0.0] * IDS
        for part in tables.values():
            for id, value in zip(part.ids, part.gradients[:, 0], strict=True):
                rows[id] += float(value)
        with self._path.open("a") as file:
            file.write(json.dumps([self._client._sequences, rows]) + "\n")
        return self._exchange(tables, blocks, **more)

    def total(self) -> torch.Tensor:
        """The sum."""
        lines = [json.loads(line) for line in self._path.read_text().splitlines()]
        last = {tuple(sequences): rows for sequences, rows in lines}
        return torch.tensor(list(last.values()), dtype=torch.float64).sum(0)


def _count(
    model: Counter,
    optimizer: torch.optim.Optimizer,
    options: argparse.Namespace,
    doom: Doom | None,
) -> int:
    bound = torch.Generator().manual_seed(options.seed)
    ids = torch.randint(IDS, (TURN * BATCH * fleet.worker_num(),), generator=bound)
    data = torch.utils.data.TensorDataset(ids)
    batches = torch.utils.data.DataLoader(data, BATCH, shuffle=True)
    loader = fleet.shard(batches, deal=options.deal, range_batches=4)
    fleet.init_worker()
    sent = Sent(Path(f"sent.{fleet.worker_index()}")) if options.mode == "geo" else None
    epochs = 0
    for epoch in itertools.count(loader.epoch):
        epochs = epoch + 1
        for (batch,) in loader:
            optimizer.zero_grad()
            (-model(batch)).backward()
            optimizer.step()
            _begin("worker", fleet.worker_index(), doom)
        # all stop behind the same epoch
        is_enough = torch.tensor([float(Path("enough").exists())])
        if fleet.all_reduce(is_enough, "min").item():
            break
    fleet.barrier_worker()
    with torch.no_grad():
        found = torch.cat([model.rows(torch.arange(IDS)).flatten(), model.batches])
    steps = TURN * fleet.worker_num()
    expected = epochs * torch.cat([torch.bincount(ids), torch.tensor([steps])]).double()
    if options.mode == "sync":
        # the mean of the workers' gradients
        expected /= fleet.worker_num()
    else:
        # workers step dense parameters, and the servers average that
        expected[-1] /= fleet.worker_num()
    if sent is not None:
        expected, found = fleet.all_reduce(sent.total()), found[:-1]
    more = found - expected
    # where halves of halves are sent, something is rounded, and more of it in large sums
    more[more.abs() < 0.01 + 1e-5 * expected.abs()] = 0
    lost, doubled = -more.clamp(max=0).sum().item(), more.clamp(min=0).sum().item()
    told = f"COUNTED {epochs * len(ids)} lost {lost:g} doubled {doubled:g}"
    sys.stdout.write(f"{told}\n")
    sys.stdout.flush()
    return int(bool(lost or doubled))


if __name__ == "__main__":
    code = main()
    if code:
        sys.exit(code)
