# SPDX-License-Identifier: Apache-2.0
"""fleet.util: Fleet's names and signatures."""

import contextlib
import io
from typing import Any

import numpy as np
import pytest
import torch
from tests.workers import run_workers

import fleetlight as fleet
from fleetlight.errors import ConfigError

pytestmark = pytest.mark.multiprocess


def helpers() -> Any:
    index = fleet.rank()
    assert (fleet.nranks(), fleet.world_size()) == (2, 2)
    with contextlib.redirect_stdout(io.StringIO()) as shown:
        fleet.util.print_on_rank("from worker 1", 1)
        fleet.util.print_on_rank("from worker 0", rank_id=0)
    fleet.util.barrier()
    fleet.util.barrier("worker")
    return (
        fleet.util.all_reduce(np.array([index, 5]), "max").tolist(),
        fleet.util.all_reduce([1, index], mode="sum", comm_world="worker").tolist(),
        fleet.util.all_gather(index, "worker"),
        fleet.util.all_reduce(torch.ones(2)).tolist(),
        shown.getvalue(),
    )


def test_operations_have_the_signatures_of_paddle_fleet() -> None:
    zero, one = run_workers(helpers)
    assert zero[:4] == one[:4] == ([1, 5], [2, 1], [0, 1], [2.0, 2.0])
    assert (zero[4], one[4]) == ("from worker 0\n", "from worker 1\n")


def refusals() -> list[str]:
    errors = []
    for call in (
        lambda: fleet.util.all_reduce(1, comm_world="server"),
        lambda: fleet.util.barrier("wroker"),
        lambda: fleet.util.print_on_rank("x", 1),
    ):
        with pytest.raises(ConfigError) as caught:
            call()
        errors.append(str(caught.value))
    with pytest.raises(AttributeError, match="did you mean 'all_reduce'"):
        _ = fleet.util.allreduce
    return errors


def test_unknown_groups_and_ranks_are_refused() -> None:
    [[world, near, rank]] = run_workers(refusals, 1)
    assert "expected 'worker': servers reply to workers" in world
    assert "did you mean 'worker'" in near
    assert "got rank_id=1, expected a worker, 0 to 0" in rank
