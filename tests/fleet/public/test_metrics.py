# SPDX-License-Identifier: Apache-2.0
"""fleet.metrics in a job: computed over all workers; unequal inputs are refused on each."""

import math
from typing import Any

import pytest
import torch
from tests.workers import run_workers

import fleetlight as fleet
from fleetlight.errors import ConfigError
from fleetlight.observe.grouped_evaluation import GroupedMetric

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


def recommender_metrics() -> Any:
    part = slice(fleet.worker_index(), None, 2)
    scores = torch.tensor([0.9, 0.8, 0.3, 0.6, 0.2, 0.7], requires_grad=True)[part]
    labels = torch.tensor([1, 0, 1, 0, 1, 0])[part]
    groups = torch.tensor([1, 1, 2, 1, 2, 2])[part]
    return (
        fleet.metrics.normalised_entropy(scores, labels),
        fleet.metrics.calibration(scores, labels),
        fleet.metrics.ndcg(scores, labels, groups),
        fleet.metrics.gauc(scores, labels, groups),
    )


def test_recommender_metrics_cover_all_workers() -> None:
    log_loss = -sum(math.log(p) for p in (0.9, 0.2, 0.3, 0.4, 0.2, 0.3))
    # the labels of group 2 in the order of scores: 0, 1, 1
    ndcg = (1 + (1 / math.log2(3) + 1 / 2) / (1 + 1 / math.log2(3))) / 2
    for entropy, calibration, ndcgs, gauc in run_workers(recommender_metrics):
        assert entropy == pytest.approx(log_loss / 6 / math.log(2), rel=1e-6)
        assert calibration == pytest.approx(3.5 / 3, rel=1e-6)
        assert ndcgs == GroupedMetric(pytest.approx(ndcg), 2, 0)
        assert gauc == GroupedMetric(0.5, 2, 0)


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
