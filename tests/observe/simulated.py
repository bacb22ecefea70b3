# SPDX-License-Identifier: Apache-2.0
"""Workers of one job as threads that exchange arrays, and samples split among them."""

import functools
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from hypothesis import strategies as st

from fleetlight.errors import ConfigError, DataError
from fleetlight.observe.evaluation import Gather, Reduce

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


#: many ties, values that differ only in the last bit, and any others.
scores_strategy = st.sampled_from([0.0, -0.0, 0.5, 0.1 + 0.2, 0.3]) | st.floats(
    allow_nan=False, allow_infinity=False
)


@st.composite
def splits(draw: st.DrawFn, element: st.SearchStrategy[Any], min_size: int = 1) -> list[list[Any]]:
    """Samples split among up to 4 workers; some may have none."""
    workers = draw(st.integers(1, 4))
    parts: list[list[Any]] = [[] for _ in range(workers)]
    for sample in draw(st.lists(element, min_size=min_size, max_size=60)):
        parts[draw(st.integers(0, workers - 1))].append(sample)
    return parts


def equal_on_all(results: list[Any]) -> Any:
    for result in results:
        if isinstance(result, Exception):
            raise result
        np.testing.assert_array_equal(result, results[0])
    return results[0]


def errors(results: list[Any]) -> list[str]:
    """The messages; all workers must fail alike, and none by waiting."""
    assert [type(result) for result in results] == [DataError] * len(results)
    return [str(result) for result in results]
