# SPDX-License-Identifier: Apache-2.0
"""PushRequest: an update is packed and checked before any of it is sent."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tests.ps.serving import DIM, OPTIONS, plan

from fleetlight.errors import GradientError
from fleetlight.kernels import dedup
from fleetlight.ps.dtypes import flat_array
from fleetlight.ps.placement import Placement
from fleetlight.ps.plan import DensePlan
from fleetlight.ps.update import TableGradients, Update
from fleetlight.ps.worker.local_parameters import LocalParameters
from fleetlight.ps.worker.push_request import PushRequest, check_differences, checked, packed

NAN = [0.0, np.nan, 0.0]


def request_of(
    row: float, dense: list[float], mode: str = "sync", dtype: str = "float32", **facts: Any
) -> PushRequest:
    """A push request of worker 1 whose last row of many is `row`."""
    known = [DensePlan("bias", (3,), dtype, 0, 0)]
    the_plan = plan(mode, server_num=2, dense=known, **facts)
    placement = Placement(the_plan)
    ids = dedup(np.arange(40), 2)
    gradients = np.ones((40, DIM), np.float32)
    gradients[-1] = row
    values = torch.tensor(dense).to(getattr(torch, dtype))
    tables = {0: TableGradients(ids.ids, ids.starts, gradients)}
    update = Update(0, 7, OPTIONS, tables, {0: flat_array(values)})
    live = LocalParameters([torch.ones(3, dtype=getattr(torch, dtype))])
    return checked(packed(update, the_plan, placement, live), the_plan, placement, 1)


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
@pytest.mark.parametrize(
    ("row", "dense", "where"),
    [(np.inf, [0.0] * 3, "table 'users'"), (1.0, NAN, "parameter 'bias'")],
)
def test_nonfinite_gradients_are_sent_to_no_server(
    row: float, dense: list[float], where: str, dtype: str
) -> None:
    with pytest.raises(GradientError, match=rf"worker 1 computed a gradient \(step 7\) of {where}"):
        request_of(row, dense, "async", dtype)
    refused = request_of(row, dense, dtype=dtype)
    assert where in refused.refusal
    assert not refused.skip
    skipped = request_of(row, dense, "async", dtype, on_nonfinite="skip")
    assert (skipped.skip, skipped.refusal) == (True, "")
    for empty in (refused, skipped):
        assert (empty.tables, empty.blocks, empty.step) == ({}, {}, 7)
    applied = request_of(row, dense, dtype=dtype, on_nonfinite="apply")
    assert (applied.skip, applied.refusal, list(applied.tables)) == (False, "", [0])


def test_finite_gradients_are_sent_whole() -> None:
    """Also if their sum would be infinite."""
    large = request_of(3e38, [3e38] * 3)
    assert (large.skip, large.refusal, list(large.tables)) == (False, "", [0])
    assert [array.tolist() for mine in large.blocks.values() for array in mine] == [
        np.full(3, 3e38, np.float32).tolist()
    ]


@pytest.mark.parametrize(
    ("row", "dense", "where"),
    [(np.inf, [0.0] * 3, "table 'users'"), (1.0, NAN, "parameter 'bias'")],
)
def test_nonfinite_differences_are_refused_as_a_whole(
    row: float, dense: list[float], where: str
) -> None:
    known = [DensePlan("bias", (3,), "float32", 0, 0)]
    ids = dedup(np.arange(40), 2)
    learned = np.ones((40, DIM), np.float32)
    learned[-1] = row
    tables = {0: TableGradients(ids.ids, ids.starts, learned)}
    for policy in ("refuse", "skip", "apply"):
        the_plan = plan("geo", server_num=2, dense=known, k_steps=2, on_nonfinite=policy)
        placement = Placement(the_plan)
        blocks = {s: [np.array(dense, np.float32)] for s in (0, 1) if placement.blocks_of(s)}
        if policy == "apply":
            check_differences(tables, blocks, 3, the_plan, placement, 1)
            continue
        with pytest.raises(GradientError, match=rf"difference \(step 3\) of {where}"):
            check_differences(tables, blocks, 3, the_plan, placement, 1)
