# SPDX-License-Identifier: Apache-2.0
"""Passes and options that a strategy sets for the programs of its job."""

from types import SimpleNamespace
from typing import Any

import pytest
from tests.fleet.collective.test_programs import example, prepared
from tests.workers import run_workers
from torch.nn import functional as F

from fleetlight import DistributedStrategy, static
from fleetlight.fleet.training.programs import options_of
from fleetlight.static.running.options import RunOptions


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, RunOptions()),
        ({"fetch_frequency": 3}, RunOptions(fetch_frequency=3)),
        ({"execution_strategy": {"num_threads": 2}}, RunOptions(num_threads=2)),
    ],
)
def test_strategy_sets_the_passes_of_programs(
    settings: dict[str, Any], expected: RunOptions
) -> None:
    context: Any = SimpleNamespace(strategy=DistributedStrategy(**settings))
    assert options_of(context) == expected


def explained(settings: dict[str, Any]) -> str:
    model, optimizer, _ = prepared(DistributedStrategy(**settings))
    return static.capture(model, F.cross_entropy, optimizer, example()).explain()


@pytest.mark.multiprocess
def test_hierarchical_all_reduce_is_named_only_when_used() -> None:
    asked = {"use_hierarchical_allreduce": True}
    assert "hierarchical" not in run_workers(explained, 2, asked)[0]
    lines = run_workers(explained, 3, {**asked, "hierarchical_allreduce_inter_nranks": 2})
    assert "1 all-reduces are hierarchical: 2 groups of 1 to 2, then 2 leaders" in lines[0]


@pytest.mark.multiprocess
def test_only_gradients_that_cross_hosts_are_narrow() -> None:
    narrow = {"compression": "bf16"}
    levels = {"use_hierarchical_allreduce": True, "hierarchical_allreduce_inter_nranks": 2}
    assert "bfloat16" not in run_workers(explained, 2, narrow)[0]
    wide, *_ = run_workers(explained, 2, {**narrow, "shared_memory": False})
    assert "1 buckets travel as bfloat16" in wide
    # inside a host nothing crosses a link
    leaders, *_ = run_workers(explained, 3, {**narrow, **levels, "shared_memory": False})
    assert "then 2 leaders in bfloat16" in leaders
    assert "travel" not in leaders
