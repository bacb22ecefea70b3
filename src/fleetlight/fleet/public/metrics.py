# SPDX-License-Identifier: Apache-2.0
"""Metrics over all workers: each gives its part, and all get the same result."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fleetlight.errors import ConfigError
from fleetlight.fleet.job import current
from fleetlight.fleet.training.consistency import check_same_shape
from fleetlight.observe import metrics as _metrics

__all__ = ["acc", "auc", "mae", "max", "min", "mse", "rmse", "sum"]


def sum(value: Any) -> Any:
    """The sum of all workers' values, element by element."""
    return _metrics.sum(value, _reduce)


def max(value: Any) -> Any:
    """The maximum of all workers' values, element by element."""
    return _metrics.max(value, _reduce)


def min(value: Any) -> Any:
    """The minimum of all workers' values, element by element."""
    return _metrics.min(value, _reduce)


def acc(correct: Any, total: Any) -> float:
    """Accuracy: all correct predictions over all predictions."""
    return _metrics.acc(correct, total, _reduce)


def mae(abserr: Any, total: Any) -> float:
    """Mean absolute error, from each worker's sum of absolute errors and number of samples."""
    return _metrics.mae(abserr, total, _reduce)


def mse(sqrerr: Any, total: Any) -> float:
    """Mean squared error, from each worker's sum of squared errors and number of samples."""
    return _metrics.mse(sqrerr, total, _reduce)


def rmse(sqrerr: Any, total: Any) -> float:
    """Root of the mean squared error, from each worker's sum of squares and number of samples."""
    return _metrics.rmse(sqrerr, total, _reduce)


def auc(
    scores: Any = None, labels: Any = None, *, stat_pos: Any = None, stat_neg: Any = None
) -> float:
    """Area under the ROC curve of all workers' scores and labels; exact, also with ties.

    `stat_pos` and `stat_neg` are histograms of the scores of either class, as in Fleet.
    """
    if (stat_pos is None) != (stat_neg is None) or (scores is None) != (labels is None):
        raise ConfigError("auc: give scores and labels, or stat_pos and stat_neg")
    if (stat_pos is None) == (scores is None):
        raise ConfigError("auc: give either scores and labels, or stat_pos and stat_neg")
    if stat_pos is not None:
        return _metrics.auc_from_histograms(stat_pos, stat_neg, _reduce)
    return _metrics.auc(scores, labels, _reduce, _gather)


def _reduce(values: NDArray[Any], op: str) -> NDArray[Any]:
    group, tensor = current().group, torch.from_numpy(values.copy())
    # workers may compute different metrics by mistake
    check_same_shape(group, tensor, "reducing a metric")
    reduced: NDArray[Any] = group.all_reduce(tensor, op).numpy()
    return reduced


def _gather(values: NDArray[Any]) -> list[NDArray[Any]]:
    parts = current().group.gather_bytes(values.tobytes(), "gathering a metric")
    return [np.frombuffer(part, dtype=values.dtype) for part in parts]


def __dir__() -> list[str]:
    own = {name for name in globals() if name.startswith("__")}
    return sorted({*own, *__all__})
