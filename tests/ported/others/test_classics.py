# SPDX-License-Identifier: Apache-2.0
"""Programs in the form of PyTorch's examples train with several workers as with one."""

import functools

import pytest
import torch
from tests.ported.others import classics as c
from tests.workers import run_workers

import fleetlight as fleet

pytestmark = [pytest.mark.long, pytest.mark.multiprocess]

PROGRAMS = {
    "tied LSTM": c.language_model,
    "DCGAN": c.adversaries,
    "LBFGS": c.series,
    "LBFGS with a line search": functools.partial(c.series, line_search="strong_wolfe"),
    "training_step": c.steps_of_its_own,
}


def my_part(value: torch.Tensor, dim: int = 0) -> torch.Tensor:
    return value.chunk(fleet.worker_num(), dim)[fleet.worker_index()].contiguous()


def distributed(name: str, dtype: torch.dtype) -> c.Values:
    """The program, with its batches split among the workers."""
    strategy = fleet.DistributedStrategy(sync_batch_norm=name == "DCGAN")
    optimizer = functools.partial(fleet.distributed_optimizer, strategy=strategy)
    return PROGRAMS[name](dtype, c.Port(fleet.distributed_model, optimizer, my_part))


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_workers_equal_one_process(name: str, dtype: torch.dtype, tolerance: float) -> None:
    expected = PROGRAMS[name](dtype, c.Port())
    for found in run_workers(distributed, 2, name, dtype):
        assert list(found) == list(expected)
        for key, value in expected.items():
            torch.testing.assert_close(found[key], value, rtol=tolerance, atol=tolerance, msg=key)
