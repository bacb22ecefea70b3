# SPDX-License-Identifier: Apache-2.0
"""The data and the clock that all programs of the parameter-server benchmarks share.

NumPy only, and Python 3.7: the oldest of the systems runs on nothing newer.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any, Dict, List, Tuple  # noqa: UP035

import numpy as np

SLOTS, NUMBERS, NEGATIVES, WIDTH = 26, 13, 5, 400
ROWS = {"wide_deep": 1_000_001, "word2vec": 100_000}
DIM = {"wide_deep": 9, "word2vec": 64}
BATCH = 512
ZIPF = 1.2
#: small, since a loss that goes astray would be another computation
LR = 0.01
#: batches made before the clock starts; then they come again: later than any exchange of GeoSGD
DISTINCT = {"wide_deep": 200, "word2vec": 800}
# frequent ids must not be adjacent, so consecutive ranks get distant ids
_SCATTER = 7_368_787


def parser() -> argparse.ArgumentParser:
    """The options that every program takes."""
    made = argparse.ArgumentParser()
    made.add_argument("--model", choices=sorted(ROWS), required=True)
    made.add_argument("--mode", choices=("sync", "async", "geo"), default="sync")
    made.add_argument("--k_steps", type=int, default=100)
    made.add_argument("--steps", type=int, required=True)
    made.add_argument("--warmup", type=int, default=20)
    return made


def ids(random: Any, model: str, shape: Tuple[int, ...]) -> Any:  # noqa: UP006
    """Ids of a click log or a text: few are frequent."""
    return random.zipf(ZIPF, shape) * _SCATTER % ROWS[model]


def batches(model: str, rank: int, count: int = 0) -> List[Tuple[Any, ...]]:  # noqa: UP006
    """One worker's batches: ids, numbers and labels, or centers, targets and labels."""
    random = np.random.default_rng(1 + rank)
    return [_BATCH[model](random) for _ in range(count or DISTINCT[model])]


def _wide_deep(random: Any) -> Tuple[Any, ...]:  # noqa: UP006
    found = ids(random, "wide_deep", (BATCH, SLOTS))
    numbers = random.random((BATCH, NUMBERS), dtype=np.float32)
    clicked = numbers.sum(1) + (found[:, 0] % 5 > 2) > 7.0
    return found, numbers, clicked.astype(np.float32)[:, None]


def _word2vec(random: Any) -> Tuple[Any, ...]:  # noqa: UP006
    centers = ids(random, "word2vec", (BATCH, 1))
    targets = ids(random, "word2vec", (BATCH, 1 + NEGATIVES))
    real = np.zeros(targets.shape, np.float32)
    real[:, 0] = 1.0
    return centers, targets, real


_BATCH = {"wide_deep": _wide_deep, "word2vec": _word2vec}


def announce_server() -> None:
    """Leave the process id where the workers, who start in the same folder, find it."""
    Path("server%d.pid" % os.getpid()).touch()  # noqa: UP031


class Window:
    """The timed part of a worker: its own time, and what the servers used meanwhile."""

    def __enter__(self) -> Window:
        # a server appears before its workers have done their first step
        self._servers = [int(path.stem[6:]) for path in Path().glob("server*.pid")]
        self._served = sum(map(cpu_s, self._servers))
        self._cpu = cpu_s(os.getpid())
        self._start = time.perf_counter()
        return self

    def __exit__(self, *_: Any) -> None:
        self.seconds = time.perf_counter() - self._start
        self.ended_at = time.time()
        self.cpu_seconds = cpu_s(os.getpid()) - self._cpu
        self.server_cpu_seconds = sum(map(cpu_s, self._servers)) - self._served
        self.server_mib = max([_peak_mib(pid) for pid in self._servers] or [0.0])

    def report(self, options: argparse.Namespace, rank: int, **facts: Any) -> None:
        """Print the line the harness reads."""
        told: Dict[str, Any] = {  # noqa: UP006
            "rank": rank,
            "ended_at": self.ended_at,
            "steps": options.steps,
            "examples": options.steps * BATCH,
            "seconds": self.seconds,
            "cpu_seconds": self.cpu_seconds,
            "server_cpu_seconds": self.server_cpu_seconds,
            "server_mib": self.server_mib,
            "worker_mib": _peak_mib(os.getpid()),
        }
        told.update(facts)
        print("RESULT " + json.dumps(told), flush=True)


def cpu_s(pid: int) -> float:
    """CPU seconds of a process, all its threads."""
    fields = Path("/proc/%d/stat" % pid).read_text().rpartition(")")[2].split()  # noqa: UP031
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _peak_mib(pid: int) -> float:
    """The most memory a process has held."""
    text = Path("/proc/%d/status" % pid).read_text()  # noqa: UP031
    lines = [line.split() for line in text.splitlines() if line.startswith("VmHWM")]
    return int(lines[0][1]) / 1024
