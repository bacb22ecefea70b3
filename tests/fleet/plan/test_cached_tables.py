# SPDX-License-Identifier: Apache-2.0
"""Which tables may have a cache."""

from typing import Any

import pytest
import torch

from fleetlight.errors import PlanError
from fleetlight.fleet.plan.bound_plan import build_plan
from fleetlight.ps.layers.embedding import SparseEmbedding
from fleetlight.ps.layers.entries import CountFilterEntry
from fleetlight.strategy import DistributedStrategy


def tables(strategy: dict[str, Any], **layer: Any) -> list[bool]:
    model = SparseEmbedding(2, **layer)
    given = [torch.optim.SGD(model.parameters(), lr=0.1)]
    made = build_plan(model, given, DistributedStrategy(**strategy), worker_num=2, server_num=1)
    return [table.cached for table in made.plan.tables]


@pytest.mark.parametrize("strategy", [{}, {"a_sync": True, "a_sync_configs": {"staleness": 0}}])
def test_modes_that_bound_the_age_of_rows_have_caches(strategy: dict[str, Any]) -> None:
    assert tables(strategy, cache="device") == [True]
    assert tables(strategy) == [False]


@pytest.mark.parametrize(
    ("strategy", "layer", "why"),
    [
        ({"a_sync": True}, {}, "the age of a cached row has no limit; set a_sync_configs="),
        ({"a_sync": True, "a_sync_configs": {"k_steps": 4}}, {}, "a worker of GeoSGD trains its"),
        ({}, {"entry": CountFilterEntry(2)}, "its entry counts each use of an id on the servers"),
    ],
)
def test_other_caches_are_refused(
    strategy: dict[str, Any], layer: dict[str, Any], why: str
) -> None:
    with pytest.raises(PlanError, match=f"'SparseEmbedding': got cache='device', but .*{why}"):
        tables(strategy, cache="device", **layer)
    tables(strategy, **layer)
