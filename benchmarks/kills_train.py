# SPDX-License-Identifier: Apache-2.0
"""A process of `kills`: a server, or a worker that writes down when each of its steps ends.

Worker 0 also kills a server and the other worker, by their process ids, and ends the job.
"""

from __future__ import annotations

import argparse
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

import fleetlight as fleet
from benchmarks import jobs
from benchmarks.peers import ps_timed
from benchmarks.ps import WideDeep, batches_of, sgd, stepper
from fleetlight.launch.processes.record import read_records

Batch = tuple[Tensor, ...]
STOP = Path("stop")
WORKERS = 2
#: steps that both workers make before the clock starts
WARM = 60


class Batches(Dataset[Batch]):
    """A few batches again and again, more than a job reads."""

    def __init__(self, rank: int) -> None:
        self._made = batches_of("wide_deep", rank)

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: int) -> Batch:
        return self._made[index % len(self._made)]


class Plan:
    """What worker 0 does at which second after both workers are warm."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._todo = [(options.server_at, "server 1"), (options.worker_at, "worker 1")]
        self._todo = [one for one in self._todo if one[0]]
        self.began = 0.0
        self.killed: dict[str, float] = {}

    def follow(self, now: float) -> None:
        """Do what is due."""
        if not self.began:
            if all(len(times_of(rank)) >= WARM for rank in range(WORKERS)):
                self.began = now
            return
        if self._todo and now >= self.began + self._todo[0][0]:
            _, name = self._todo.pop(0)
            self.killed[name] = time.time() - self.began
            [(record, _)] = read_records(Path("log"))
            [pid] = [entry.pid for entry in record.processes if entry.name == name]
            os.kill(pid, signal.SIGKILL)
        if now >= self.began + self._options.end_at:
            STOP.touch()


def main() -> None:
    """Serve, or train until worker 0 ends the job."""
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--durability", choices=("none", "log"), required=True)
    add("--server_at", type=float, default=0.0, help="0: no server is killed")
    add("--worker_at", type=float, default=0.0, help="0: no worker is killed")
    add("--per_s", type=float, required=True, help="batches of a worker")
    add("--end_at", type=float, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    strategy = fleet.DistributedStrategy(a_sync=True, durability=options.durability)
    fleet.init(strategy=strategy)
    model = fleet.distributed_model(WideDeep(lambda rows, dim: fleet.nn.SparseEmbedding(dim)))
    step = stepper(model, fleet.distributed_optimizer(sgd(model)))
    if fleet.is_server():
        fleet.init_server()
        fleet.run_server()
        return
    fleet.init_worker()
    rank = fleet.worker_index()
    plan = Plan(options)
    # its next incarnation continues the file
    times = os.open(f"{rank}.times", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    for batch in _batches(rank, options.per_s):
        step(*batch)
        os.write(times, np.float64(now := time.time()).tobytes())
        if rank == 0:
            plan.follow(now)
        if STOP.exists():
            break
    fleet.stop_worker()
    if rank == 0:
        found = [[at - plan.began for at in times_of(rank).tolist()] for rank in range(WORKERS)]
        jobs.result(killed=plan.killed, times=found, samples=ps_timed.BATCH)


def times_of(rank: int) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """When each step of a worker has ended."""
    path = Path(f"{rank}.times")
    data = path.read_bytes() if path.exists() else b""
    return np.frombuffer(data[: len(data) // 8 * 8], np.float64)


def _batches(rank: int, per_s: float) -> Iterator[Batch]:
    """The batches of a worker, at most so many a second; what was missed does not come later."""
    loader = DataLoader(Batches(rank), batch_size=1, collate_fn=lambda of: of[0])
    due = 0.0
    for batch in fleet.shard(loader):
        time.sleep(max(0.0, due - time.monotonic()))
        due = max(due, time.monotonic() - 1 / per_s) + 1 / per_s
        yield batch


if __name__ == "__main__":
    main()
