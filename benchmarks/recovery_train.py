# SPDX-License-Identifier: Apache-2.0
"""A process of `recovery`: a server that is killed, or the worker that kills it and waits for it.

The worker times every step, and notes whether a snapshot was in progress.
"""

from __future__ import annotations

import argparse
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import fleetlight as fleet
from benchmarks import jobs
from benchmarks.scale_train import (
    FIRST,
    KNOWN,
    LR,
    NEW,
    Lines,
    Step,
    check_same,
    ids_of,
    known,
    sample,
    step_of,
)

FOLDER, PID = "durability", Path("server.pid")
#: how long a snapshot may take to come
SNAPSHOT_S = 600.0


def main() -> None:
    """Serve, or train, kill and report."""
    options = _parse()
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
    while not any(path.stat().st_mtime > before for path in Path(FOLDER).glob("*/rows-*")):
        _step(step, some, end)
    while _is_writing():
        _step(step, some, end)


def _step(step: Step, some: Iterator[Tensor], end: float) -> None:
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


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("phase", choices=("kill", "lose"))
    parser.add_argument("--rows", type=int, default=0)
    parser.add_argument("--kills", type=int, default=0)
    parser.add_argument("--snapshot_s", type=float, default=300.0)
    parser.add_argument("--tail_s", type=float, default=0.0, help="of training before a kill")
    parser.add_argument("--quiet_s", type=float, default=0.0, help="of timed steps")
    return parser.parse_args()


if __name__ == "__main__":
    main()
