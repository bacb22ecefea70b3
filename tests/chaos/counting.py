# SPDX-License-Identifier: Apache-2.0
"""Counts records: a row is the number of times that its id was pushed.

Each epoch pushes every record once. At the end all rows must say exactly that. GeoSGD sends only a
part of its updates, so there the sent values are counted.
"""

import argparse
import itertools
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from tests.chaos import harms
from tests.chaos.self_kill import SelfKill

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
    """A row of equal numbers for each id, and one number for the number of batches."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.rows = fleet.nn.SparseEmbedding(width, initializer="zeros")
        self.batches = torch.nn.Parameter(torch.zeros(1))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.rows(ids).sum() + self.batches.sum()


def main() -> int:
    """Serve, or count until there is a file `enough`; returns 0 where every count is exact."""
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
    harms.install(options.harms, f"{options.seed} {kind} {number} {os.getpid()}")
    self_kill = None
    if kind in options.self_kill and not Path("enough").exists():
        incarnation = _incarnation(kind, number)
        self_kill = SelfKill(f"{options.seed} {kind} {number} {incarnation}")
        if incarnation > 1:
            self_kill.install()
    model = fleet.distributed_model(Counter(options.width))
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=1.0))
    if fleet.is_server():
        fleet.init_server()
        _begin(kind, number, self_kill)
        fleet.run_server()
        return 0
    return _count(model, optimizer, options, self_kill)


def _parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--mode", choices=MODES, default="async")
    parser.add_argument("--deal", choices=("blocks", "queue"), default="blocks")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--width", type=int, default=1, help="numbers in a row")
    parser.add_argument("--snapshot_s", type=float, default=1.0)
    parser.add_argument("--every_steps", type=int, default=0, help="between two checkpoints")
    parser.add_argument(
        "--self_kill", nargs="*", default=[], help="kinds that kill themselves at critical moments"
    )
    parser.add_argument("--harms", nargs="*", choices=harms.HARMS, default=[])
    return parser.parse_args()


def _incarnation(kind: str, number: int) -> int:
    """The incarnation of this process, which determines its moment to die."""
    path = Path(f"incarnation.{kind}.{number}")
    incarnation = 1 + (int(path.read_text()) if path.exists() else 0)
    path.write_text(str(incarnation))
    return incarnation


def _begin(kind: str, number: int, self_kill: SelfKill | None) -> None:
    """Report that this process is at work, so that it may be killed.

    Before that, a death restarts the whole job, which counts again from zero.
    """
    # as a whole, since a kill may come between any two calls
    written = Path(f"new.{kind}.{number}")
    written.write_text(f"{os.getpid()}\n")
    written.replace(f"pid.{kind}.{number}")
    if self_kill is not None:
        self_kill.install()


class Sent:
    """The values that a worker of GeoSGD has sent, over all its incarnations.

    A value that was sent is never computed again; others are, under the same numbers.
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
    self_kill: SelfKill | None,
) -> int:
    bound = torch.Generator().manual_seed(options.seed)
    ids = torch.randint(IDS, (TURN * BATCH * fleet.worker_num(),), generator=bound)
    batches = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(ids), BATCH, shuffle=True)
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
            _begin("worker", fleet.worker_index(), self_kill)
        # all stop after the same epoch
        is_enough = torch.tensor([float(Path("enough").exists())])
        if fleet.all_reduce(is_enough, "min").item():
            break
    fleet.barrier_worker()
    with torch.no_grad():
        rows = model.rows(torch.arange(IDS))
        assert torch.equal(rows, rows[:, :1].expand_as(rows)), "a row was updated in part"
        found = torch.cat([rows[:, 0], model.batches])
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
    # halves of halves round, and more so in large sums
    more[more.abs() < 0.01 + 1e-5 * expected.abs()] = 0
    lost, doubled = -more.clamp(max=0).sum().item(), more.clamp(min=0).sum().item()
    line = f"COUNTED {epochs * len(ids)} lost {lost:g} doubled {doubled:g}"
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()
    return int(bool(lost or doubled))


if __name__ == "__main__":
    code = main()
    if code:
        sys.exit(code)
