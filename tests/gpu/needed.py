# SPDX-License-Identifier: Apache-2.0
"""The marks of tests that need a GPU, and functions that train in both places.

Two workers of these tests share one GPU. NCCL refuses that, so they reduce with Gloo.
"""

import os
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from tests.workers import run_processes

import fleetlight as fleet

GPU = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


def close(found: Any, expected: Any) -> None:
    """Assert that values are close: float32 on a GPU adds in another order."""
    torch.testing.assert_close(found, expected, check_device=False, rtol=1e-4, atol=1e-5)


def on_both(train: Callable[[str], Any]) -> tuple[Any, Any]:
    """The result of a function on the CPU and on the GPU."""
    return train("cpu"), train("cuda")


def on_one_gpu(function: Callable[..., Any], *args: Any, workers: int = 2) -> Sequence[Any]:
    """Call a function in workers that share the GPU."""
    return run_processes(_joined, [(function, workers, args)] * workers, deadline_s=40.0)


def _joined(function: Callable[..., Any], workers: int, args: tuple[Any, ...]) -> Any:
    # with more workers than GPUs, fleet.init chooses Gloo
    os.environ["FLEET_LOCAL_SIZE"] = str(1 + torch.cuda.device_count() if workers > 1 else 1)
    fleet.init(is_collective=True)
    value = function(*args)
    fleet.stop_worker()
    return value
