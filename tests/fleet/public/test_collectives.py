# SPDX-License-Identifier: Apache-2.0
"""Collectives over values of every kind: exact, type-preserving, unequal kinds refused."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tests.workers import run_workers

import fleetlight as fleet
from fleetlight.errors import ConfigError

pytestmark = pytest.mark.multiprocess

BIG = 2**53 + 1


def kinds() -> Any:
    read_only = np.arange(3)
    read_only.setflags(write=False)
    return (
        [
            fleet.all_reduce(v, "max")
            for v in (np.int64(BIG), np.bool_(True), np.float32(0.1), True)
        ],
        [fleet.all_reduce(v) for v in (np.int32(3), np.int8(100), np.bool_(True), True, BIG, 0.5)],
        [fleet.all_gather(v)[1] for v in (np.uint8(200), np.bool_(False), False, np.float64(2.5))],
        fleet.all_reduce(read_only),
        fleet.all_reduce(torch.arange(6.0).reshape(2, 3).t()),
    )


def test_collectives_return_exact_numbers_of_the_same_type() -> None:
    for largest, total, gathered, array, tensor in run_workers(kinds):
        assert largest == [BIG, True, np.float32(0.1), True]
        assert [type(v) for v in largest] == [np.int64, np.bool_, np.float32, bool]
        # a sum that overflows its type gets a wider one; bools are counted
        assert total == [6, 200, 2, 2, 2 * BIG, 1.0]
        assert [type(v) for v in total[:2]] == [np.int32, np.int64]
        assert gathered == [200, False, False, 2.5]
        assert [type(v) for v in gathered] == [np.uint8, np.bool_, bool, np.float64]
        assert array.tolist() == [0, 2, 4]
        assert torch.equal(tensor, 2 * torch.arange(6.0).reshape(2, 3).t())


def refused(call: Callable[[Any], Any], mine: list[Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        call(mine[fleet.worker_index()])
    return str(caught.value)


def unlike() -> Any:
    return [
        refused(fleet.all_reduce, [torch.ones(3), torch.ones(4)]),
        refused(fleet.all_reduce, [1, 1.0]),
        refused(fleet.all_gather, [torch.ones(2), torch.ones(2).double()]),
        refused(fleet.all_reduce, [2**63, 2**63]),
    ]


def test_unlike_values_are_refused_on_every_worker() -> None:
    for shapes, dtypes, gathered, large in run_workers(unlike):
        assert shapes.startswith("all_reduce: worker 0 passed torch.float32 [3], worker 1 passed")
        assert "torch.int64 [], worker 1 passed torch.float64 []" in dtypes
        assert gathered.startswith("all_gather: worker 0 passed torch.float32 [2], worker 1 passed")
        assert "expected an integer of 64 bits" in large
