# SPDX-License-Identifier: Apache-2.0
"""A process of `recovery`: a server that is killed, or the worker that kills it and waits for it.

The worker times every step, and notes whether a snapshot was in progress.
"""

from __future__ import annotations

import argparse
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

import fleetlight as fleet
from benchmarks import jobs

Floats = NDArray[np.float32]
#: a step on some ids; the seconds it took
Step = Callable[[Tensor], float]
DIM, LR = 8, 0.05
#: ids of a step: of one that makes rows, and of one that trains rows there are
NEW, KNOWN, SEEN = 50_000, 20_000, 10_000
#: ids whose step has the kernels compiled or read from files
FIRST = 1_000
#: consecutive numbers become ids all over the 64 bits
_SCATTER = 0x9E3779B97F4A7C15
FOLDER, PID = "durability", Path("server.pid")
#: how long a snapshot may take to come
SNAPSHOT_S = 600.0


class Lines(nn.Module):
    """Log-odds from one row for each record."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = fleet.nn.SparseEmbedding(DIM)
        self.last = nn.Linear(DIM, 1)

    def forward(self, ids: Tensor) -> Tensor:
        """Log-odds of each record."""
        found: Tensor = self.last(self.rows(ids))
        return found.squeeze(1)


def step_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    """Trains on some ids, and says how long that took."""

    def step(ids: Tensor) -> float:
        began = time.perf_counter()
        loss = binary_cross_entropy_with_logits(model(ids), (ids > 0).float())
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        loss.item()
        return time.perf_counter() - began

    return step


def known(rows: int) -> Iterator[Tensor]:
    """Endless batches of ids that have been seen."""
    random = np.random.default_rng(1)
    while True:
        yield ids_of(random.integers(0, rows, KNOWN))


def ids_of(numbers: NDArray[np.int64]) -> Tensor:
    """Ids of consecutive numbers, each its own."""
    return torch.from_numpy((numbers.astype(np.uint64) * np.uint64(_SCATTER)).view(np.int64))


@torch.no_grad()
def sample(model: nn.Module, rows: int) -> Floats:
    """The rows of some ids, from the first to the last."""
    ids = ids_of(np.linspace(0, rows - 1, min(rows, SEEN)).astype(np.int64))
    found: Floats = model.get_submodule("rows")(ids).numpy()
    return found


def check_same(found: Floats, expected: Floats) -> None:
    """Refuse rows that are not, bit by bit, what was saved."""
    wrong = int((found != expected).any(axis=1).sum())
    if wrong:
        raise jobs.BenchmarkError(f"{wrong} of {len(found)} rows are not as they were saved")


def main() -> None:
    """Serve, or train, kill and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("phase", choices=("kill", "lose"))
    add("--rows", type=int, default=0)
    add("--kills", type=int, default=0)
    add("--snapshot_s", type=float, default=300.0)
    add("--tail_s", type=float, default=0.0, help="of training before a kill")
    add("--quiet_s", type=float, default=0.0, help="of timed steps")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    strategy = fleet.DistributedStrategy(
        durability="log",
        durability_configs={"folder": FOLDER, "snapshot_s": options.snapshot_s},
        a_sync=options.phase == "lose",
    )
    fleet.init(strategy=strategy)
    model = fleet.distributed_model(Lines())
    optimizer = torch.optim.Adagrad(model.parameters(), lr=LR)
    optimizer = fleet.distributed_optimizer(optimizer)
    if fleet.is_server():
        fleet.init_server()
        PID.write_text(f"{os.getpid()}\n")
        fleet.run_server()
        return
    fleet.init_worker()
    {"kill": kill, "lose": lose}[options.phase](options, model, step_of(model, optimizer))
    fleet.stop_worker()


def kill(options: argparse.Namespace, model: nn.Module, step: Step) -> None:
    """Let a table grow, train beside snapshots, and kill the server again and again."""
    step(ids_of(np.arange(min(FIRST, options.rows))))
    for at in range(0, options.rows, NEW):
        step(ids_of(np.arange(at, min(at + NEW, options.rows))))
    some = known(options.rows)
    _until_snapshot(step, some)
    stretches = _timed(step, some, options.quiet_s)
    kills = [_kill(model, step, some, options) for _ in range(options.kills)]
    jobs.result(stretches=stretches, kills=kills)


def _until_snapshot(step: Step, some: Iterator[Tensor]) -> None:
    """Train until rows that are all there now are in a snapshot."""
    before, end = time.time(), time.monotonic() + SNAPSHOT_S
    while _is_writing() or not any(
        p.stat().st_mtime > before for p in Path(FOLDER).glob("*/rows-*")
    ):
        if time.monotonic() > end:
            raise jobs.BenchmarkError(f"no snapshot came within {SNAPSHOT_S:g} s")
        step(next(some))


def _is_writing() -> bool:
    """True while rows are written beside training."""
    rows = Path(FOLDER).glob("*/rows-*")
    return any(not (path / "manifest.json").exists() for path in rows)


def _timed(step: Step, some: Iterator[Tensor], seconds: float) -> list[list[float]]:
    """Steps while nothing is written, then while something is, and so on by turns."""
    stretches: list[list[float]] = [[]]
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if _is_writing() == len(stretches) % 2:
            stretches.append([])
        stretches[-1].append(step(next(some)))
    return stretches


def _kill(
    model: nn.Module, step: Step, some: Iterator[Tensor], options: argparse.Namespace
) -> dict[str, Any]:
    """How long rows could not be read; checks that they are the same after it."""
    end = time.monotonic() + options.tail_s
    while time.monotonic() < end or _is_writing():
        step(next(some))
    rows = sample(model, options.rows)
    log = _log_bytes()
    os.kill(int(PID.read_text()), signal.SIGKILL)
    began = time.monotonic()
    found = sample(model, options.rows)
    away_s = time.monotonic() - began
    check_same(found, rows)
    return {"away_s": away_s, "log_mib": log / 2**20}


def _log_bytes() -> int:
    """What a server that is started now has to read back: all from the last snapshot on."""
    first = max(int(path.name.removeprefix("rows-")) for path in Path(FOLDER).glob("*/rows-*"))
    logs = [path for path in Path(FOLDER).glob("server-*/*.journal") if int(path.stem) >= first]
    return sum(path.stat().st_size for path in logs)


def lose(options: argparse.Namespace, model: nn.Module, step: Step) -> None:
    """The second worker dies, and says when; the first one trains until it is told."""
    some = known(KNOWN)
    for _ in range(20):
        step(next(some))
    if not fleet.is_first_worker():
        Path("died").write_text(str(time.time()))
        os.kill(os.getpid(), signal.SIGKILL)
    while True:
        step(next(some))


if __name__ == "__main__":
    main()
