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
from fleetlight.observe import grouped_metrics as _grouped
from fleetlight.observe import metrics as _metrics
from fleetlight.observe import probability_metrics as _probabilities
from fleetlight.observe.grouped_metrics import GroupedMetric

__all__ = [
    "acc",
    "auc",
    "calibration",
    "gauc",
    "mae",
    "max",
    "min",
    "mse",
    "ndcg",
    "normalised_entropy",
    "rmse",
    "sum",
]


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
    if _of_records(
        "auc", {"scores": scores, "labels": labels}, {"stat_pos": stat_pos, "stat_neg": stat_neg}
    ):
        return _metrics.auc(scores, labels, _reduce, _gather)
    return _metrics.auc_from_histograms(stat_pos, stat_neg, _reduce)


def normalised_entropy(
    probabilities: Any = None,
    labels: Any = None,
    *,
    log_loss: Any = None,
    positives: Any = None,
    total: Any = None,
) -> float:
    """Mean log loss of all workers' records over the entropy of their base rate.

    `log_loss`, `positives` and `total` are this worker's sums, in place of its records.
    """
    if _of_records(
        "normalised_entropy",
        {"probabilities": probabilities, "labels": labels},
        {"log_loss": log_loss, "positives": positives, "total": total},
    ):
        return _probabilities.normalised_entropy(probabilities, labels, _reduce)
    return _probabilities.normalised_entropy_from_sums(log_loss, positives, total, _reduce)


def calibration(
    probabilities: Any = None, labels: Any = None, *, predicted: Any = None, positives: Any = None
) -> float:
    """The sum of all workers' probabilities over the number of their positives.

    `predicted` and `positives` are this worker's sums, in place of its records.
    """
    if _of_records(
        "calibration",
        {"probabilities": probabilities, "labels": labels},
        {"predicted": predicted, "positives": positives},
    ):
        return _probabilities.calibration(probabilities, labels, _reduce)
    return _probabilities.calibration_from_sums(predicted, positives, _reduce)


def ndcg(scores: Any, labels: Any, groups: Any, k: int | None = None) -> GroupedMetric:
    """Mean NDCG of the groups of all workers' records, of the k highest scores if k is given."""
    if k is not None and (isinstance(k, bool) or not isinstance(k, int) or k < 1):
        raise ConfigError(f"ndcg: got k={k!r}, expected a whole number of at least 1, or None")
    return _grouped.ndcg(scores, labels, groups, k, _reduce, _gather, current().group.index)


def gauc(scores: Any, labels: Any, groups: Any) -> GroupedMetric:
    """Mean AUC of the groups of all workers' records, weighted with their numbers of records."""
    return _grouped.gauc(scores, labels, groups, _reduce, _gather, current().group.index)


def _of_records(name: str, records: dict[str, Any], statistics: dict[str, Any]) -> bool:
    """True if records are given, False if statistics are; an error for parts of both."""
    given = [
        [value is not None for value in arguments.values()] for arguments in (records, statistics)
    ]
    if any(map(all, given)) and not all(map(any, given)):
        return all(given[0])
    either, other = (" and ".join(arguments) for arguments in (records, statistics))
    raise ConfigError(f"{name}: give either {either}, or {other}")


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
