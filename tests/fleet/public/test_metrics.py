# SPDX-License-Identifier: Apache-2.0
"""fleet.metrics in a job: computed over all workers; unequal inputs are refused on each."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.workers import run_workers

import fleetlight as fleet
from fleetlight.errors import ConfigError

pytestmark = pytest.mark.multiprocess


def metrics() -> Any:
    index = fleet.worker_index()
    scores = [[0.1, 0.4, 0.35], [0.8]][index]
    labels = [[0, 0, 1], [1]][index]
    return (
        fleet.metrics.auc(scores, labels),
        fleet.metrics.acc(3 + index, 4),
        fleet.metrics.sum(index + 1),
        fleet.metrics.max(torch.tensor([index, 5])).tolist(),
        fleet.metrics.mae(1.0, 2),
        fleet.metrics.rmse(8.0, 1),
        fleet.metrics.mse(8.0, 1),
    )


def test_metrics_cover_all_workers() -> None:
    for auc, acc, total, largest, mae, rmse, mse in run_workers(metrics):
        assert auc == 0.75
        assert acc == 7 / 8
        assert total == 3
        assert largest == [1, 5]
        assert mae == 0.5
        assert rmse == pytest.approx(8**0.5)
        assert mse == 8


def unlike() -> list[str]:
    errors = []
    for call in (
        lambda: fleet.metrics.sum(torch.ones(*[(2, 3), (3, 2)][fleet.worker_index()])),
        [lambda: fleet.metrics.acc(1, 2), lambda: fleet.metrics.sum([1, 2])][fleet.worker_index()],
    ):
        with pytest.raises(ConfigError) as caught:
            call()
        errors.append(str(caught.value))
    return errors


def test_unlike_values_are_refused_on_every_worker() -> None:
    for shapes, metrics_ in run_workers(unlike):
        assert (
            "worker 0 passed torch.float64 [2, 3], worker 1 passed torch.float64 [3, 2]" in shapes
        )
        assert (
            "a metric: worker 0 passed torch.float64 [2], worker 1 passed torch.int64" in metrics_
        )
