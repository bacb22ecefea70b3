# SPDX-License-Identifier: Apache-2.0
"""Workers of one job as threads that exchange arrays."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from fleetlight.errors import ConfigError
from fleetlight.observe.metrics import Gather, Reduce

OPS = {"sum": np.add, "max": np.maximum, "min": np.minimum}
Body = Callable[[int, Reduce, Gather], Any]


class Job:
    """`run` returns the result of each worker, or the exception that it raised."""

    def __init__(self, workers: int) -> None:
        self.workers = workers
        self._slots: list[Any] = [None] * workers
        self._barrier = threading.Barrier(workers, timeout=20)

    def run(self, body: Body) -> list[Any]:
        with ThreadPoolExecutor(self.workers) as pool:
            futures = [pool.submit(self._worker, body, rank) for rank in range(self.workers)]
        return [future.exception() or future.result() for future in futures]

    def _worker(self, body: Body, rank: int) -> Any:
        def exchange(array: np.ndarray) -> list[np.ndarray]:
            self._slots[rank] = array
            self._barrier.wait()
            gathered = list(self._slots)
            self._barrier.wait()
            return gathered

        def gather(array: np.ndarray) -> list[np.ndarray]:
            assert array.ndim == 1
            return exchange(array)

        def reduce(array: np.ndarray, op: str) -> np.ndarray:
            gathered = exchange(array)
            if len({(part.shape, part.dtype) for part in gathered}) > 1:
                raise ConfigError("not alike")
            return functools.reduce(OPS[op], gathered)

        return body(rank, reduce, gather)
