# SPDX-License-Identifier: Apache-2.0
"""A process of `scale`: a server, or the worker that makes a table grow, saves or loads it.

During a save it continues to train and times every step. Rows that it reads just before the save
must be the same after the load.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
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
from benchmarks.peers import ps_timed

Floats = NDArray[np.float32]
#: a step on some ids; the seconds it took
Step = Callable[[Tensor], float]

DIM, LR = 8, 0.05
#: ids of a step: of one that makes rows, and of one that trains rows there are
NEW, KNOWN = 50_000, 20_000
#: steps that show how long one takes when nothing else goes on
QUIET = 200
SEEN = 10_000
#: ids whose step has the kernels compiled or read from files
FIRST = 1_000
#: how long a save may take
SAVE_S = 1800.0
#: consecutive numbers become ids all over the 64 bits
_SCATTER = 0x9E3779B97F4A7C15
MANIFEST = "manifest.json"
SAMPLE = "sample.npy"
#: the most memory a process has held, and what it holds of its own now
PEAK, OWN = "VmHWM", "RssAnon"


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


def main() -> None:
    """Serve, or train and report."""
    options = _parse()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    fleet.init()
    plain = Lines()
    model = fleet.distributed_model(plain)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=LR)
    optimizer = fleet.distributed_optimizer(optimizer, fleet.DistributedStrategy())
    if fleet.is_server():
        ps_timed.announce_server()
        fleet.init_server()
        fleet.run_server()
        return
    fleet.init_worker()
    step = step_of(model, optimizer)
    facts = {"grow": grow, "load": load}[options.phase](options, model, step)
    jobs.result(**facts, worker_mib=held_mib("self"), servers_mib=servers_mib())
    fleet.stop_worker()


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


def grow(options: argparse.Namespace, model: nn.Module, step: Step) -> dict[str, Any]:
    """Train on ids not seen before, then on known ones; save alone, then beside training."""
    step(ids_of(np.arange(min(FIRST, options.rows))))
    began = time.perf_counter()
    starts = range(0, options.rows, NEW)
    new = [step(ids_of(np.arange(at, min(at + NEW, options.rows)))) for at in starts]
    grown_s = time.perf_counter() - began
    grown_mib = servers_mib()
    some = known(options.rows)
    quiet = [step(next(some)) for _ in range(QUIET)]
    np.save(options.folder / SAMPLE, sample(model, options.rows))
    alone_s = save_alone(options.folder / "alone")
    target = options.folder / "checkpoint"
    began = time.perf_counter()
    fleet.save_persistables(target, background=True)
    call_s = time.perf_counter() - began
    beside = []
    while not (target / MANIFEST).exists():
        beside.append(step(next(some)))
        if time.perf_counter() - began > SAVE_S:
            raise jobs.BenchmarkError(f"not saved after {SAVE_S:g} s, see the servers' logs")
    saved_s = time.perf_counter() - began
    return {
        "grown_s": grown_s,
        "grown_mib": grown_mib,
        "new": told(new),
        "quiet": told(quiet),
        "alone_s": alone_s,
        "call_s": call_s,
        "beside": told(beside or [0.0]),
        "saved_s": saved_s,
        "bytes": sum(path.stat().st_size for path in target.rglob("*") if path.is_file()),
    }


def save_alone(target: Path) -> float:
    """The seconds of a save without training."""
    began = time.perf_counter()
    fleet.save_persistables(target)
    took = time.perf_counter() - began
    shutil.rmtree(target)
    return took


def load(options: argparse.Namespace, model: nn.Module, step: Step) -> dict[str, Any]:
    """Load what was saved, compare, and train on."""
    began = time.perf_counter()
    fleet.load_persistables(options.folder / "checkpoint")
    loaded_s = time.perf_counter() - began
    loaded_mib = servers_mib()
    check_same(sample(model, options.rows), np.load(options.folder / SAMPLE))
    some = known(options.rows)
    step(next(some))
    quiet = [step(next(some)) for _ in range(QUIET)]
    own_mib = servers_mib(OWN)
    return {
        "loaded_s": loaded_s,
        "loaded_mib": loaded_mib,
        "own_mib": own_mib,
        "quiet": told(quiet),
    }


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


def told(seconds: list[float]) -> dict[str, float]:
    """Of some steps: how many, how long as a rule, how long at most."""
    of = {"median_ms": statistics.median(seconds), "longest_ms": max(seconds)}
    return {"steps": len(seconds), **{name: 1e3 * value for name, value in of.items()}}


def servers_mib(field: str = PEAK) -> list[float]:
    """What each server holds by a field of its status: by default the most it has held so far."""
    return sorted(held_mib(path.stem[6:], field) for path in Path().glob("server*.pid"))


def held_mib(pid: str, field: str = PEAK) -> float:
    """What a process holds; of its peak pages of mapped files are a part."""
    text = Path(f"/proc/{pid}/status").read_text()
    line = next(line for line in text.splitlines() if line.startswith(field))
    return int(line.split()[1]) / 1024


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("phase", choices=("grow", "load"))
    parser.add_argument("--rows", type=int, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    return parser.parse_args()


if __name__ == "__main__":
    main()
