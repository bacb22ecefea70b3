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
from fleetlight.observe import evaluation as _metrics
from fleetlight.observe import grouped_evaluation as _grouped
from fleetlight.observe import probability_evaluation as _probabilities
from fleetlight.observe.grouped_evaluation import GroupedMetric

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
    """The sum of all workers' values, element by element.

    Args:
        value: this worker's number, array or tensor.

    Returns:
        The sum on every worker.

    Example:
        >>> fleet.init(is_collective=True)
        >>> fleet.metrics.sum(3.0)
        3.0
    """
    return _metrics.sum(value, _reduce)


def max(value: Any) -> Any:
    """The maximum of all workers' values, element by element.

    Args:
        value: this worker's number, array or tensor.

    Returns:
        The maximum on every worker.

    Example:
        >>> fleet.init(is_collective=True)
        >>> fleet.metrics.max(3.0)
        3.0
    """
    return _metrics.max(value, _reduce)


def min(value: Any) -> Any:
    """The minimum of all workers' values, element by element.

    Args:
        value: this worker's number, array or tensor.

    Returns:
        The minimum on every worker.

    Example:
        >>> fleet.init(is_collective=True)
        >>> fleet.metrics.min(3.0)
        3.0
    """
    return _metrics.min(value, _reduce)


def acc(correct: Any, total: Any) -> float:
    """Accuracy: all correct predictions over all predictions.

    Args:
        correct: the number of correct predictions of this worker.
        total: the number of its predictions.

    Returns:
        The accuracy, between 0 and 1.

    Example:
        >>> fleet.init(is_collective=True)
        >>> fleet.metrics.acc(correct=90, total=100)
        0.9
    """
    return _metrics.acc(correct, total, _reduce)


def mae(abserr: Any, total: Any) -> float:
    """Mean absolute error, from each worker's sum of absolute errors and number of samples.

    Args:
        abserr: the sum of this worker's absolute errors.
        total: the number of its samples.

    Returns:
        The mean over all samples.

    Example:
        >>> fleet.init(is_collective=True)
        >>> fleet.metrics.mae(abserr=5.0, total=10)
        0.5
    """
    return _metrics.mae(abserr, total, _reduce)


def mse(sqrerr: Any, total: Any) -> float:
    """Mean squared error, from each worker's sum of squared errors and number of samples.

    Args:
        sqrerr: the sum of this worker's squared errors.
        total: the number of its samples.

    Returns:
        The mean over all samples.

    Example:
        >>> fleet.init(is_collective=True)
        >>> fleet.metrics.mse(sqrerr=2.5, total=10)
        0.25
    """
    return _metrics.mse(sqrerr, total, _reduce)


def rmse(sqrerr: Any, total: Any) -> float:
    """Root of the mean squared error, from each worker's sum of squares and number of samples.

    Args:
        sqrerr: the sum of this worker's squared errors.
        total: the number of its samples.

    Returns:
        The root of the mean over all samples.

    Example:
        >>> fleet.init(is_collective=True)
        >>> fleet.metrics.rmse(sqrerr=2.5, total=10)
        0.5
    """
    return _metrics.rmse(sqrerr, total, _reduce)


def auc(
    scores: Any = None, labels: Any = None, *, stat_pos: Any = None, stat_neg: Any = None
) -> float:
    """Area under the ROC curve of all workers' scores and labels; exact, even with ties.

    `stat_pos` and `stat_neg` are histograms of the scores of either class, as in Fleet.

    Args:
        scores: this worker's scores.
        labels: their labels, 0 or 1.
        stat_pos: in place of records, a histogram of the scores of positives.
        stat_neg: in place of records, a histogram of the scores of negatives.

    Returns:
        The area, between 0 and 1; 0.5 if one class is missing, with a warning.

    Raises:
        ConfigError: neither records nor histograms are given, or parts of both.
        DataError: scores and labels do not fit together.

    Example:
        >>> fleet.init(is_collective=True)
        >>> fleet.metrics.auc([0.1, 0.4, 0.35, 0.8], [0, 0, 1, 1])
        0.75
    """
    if _has_records(
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

    Args:
        probabilities: this worker's predicted probabilities.
        labels: their labels, 0 or 1.
        log_loss: in place of records, the sum of the log losses.
        positives: the number of positives.
        total: the number of records.

    Returns:
        The ratio; below 1 is better than predicting the base rate.

    Raises:
        ConfigError: neither records nor sums are given, or parts of both.
        DataError: a probability is not between 0 and 1.

    Example:
        >>> fleet.init(is_collective=True)
        >>> fleet.metrics.normalised_entropy([0.5, 0.5], [0, 1])
        1.0
    """
    if _has_records(
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

    Args:
        probabilities: this worker's predicted probabilities.
        labels: their labels, 0 or 1.
        predicted: in place of records, the sum of the probabilities.
        positives: the number of positives.

    Returns:
        The ratio; above 1 predicts too many positives.

    Raises:
        ConfigError: neither records nor sums are given, or parts of both.
        DataError: a probability is not between 0 and 1.

    Example:
        >>> fleet.init(is_collective=True)
        >>> fleet.metrics.calibration([0.75, 0.75], [0, 1])
        1.5
    """
    if _has_records(
        "calibration",
        {"probabilities": probabilities, "labels": labels},
        {"predicted": predicted, "positives": positives},
    ):
        return _probabilities.calibration(probabilities, labels, _reduce)
    return _probabilities.calibration_from_sums(predicted, positives, _reduce)


def ndcg(scores: Any, labels: Any, groups: Any, k: int | None = None) -> GroupedMetric:
    """Mean NDCG of the groups of all workers' records, of the k highest scores if k is given.

    Args:
        scores: this worker's scores.
        labels: their gains, 0 or more.
        groups: the group of each record, such as its query.
        k: how many records of a group count; None for all.

    Returns:
        A record with `value`, `groups` (that count) and `skipped` (without a label above 0).

    Raises:
        ConfigError: `k` is no whole number of at least 1.
        DataError: the arguments do not fit together.

    Example:
        >>> fleet.init(is_collective=True)
        >>> fleet.metrics.ndcg([0.9, 0.1], [1, 0], groups=[7, 7])
        GroupedMetric(value=1.0, groups=1, skipped=0)
    """
    if k is not None and (isinstance(k, bool) or not isinstance(k, int) or k < 1):
        raise ConfigError(f"ndcg: got k={k!r}, expected a whole number of at least 1, or None")
    return _grouped.ndcg(scores, labels, groups, k, _reduce, _gather, current().group.index)


def gauc(scores: Any, labels: Any, groups: Any) -> GroupedMetric:
    """Mean AUC of the groups of all workers' records, weighted with their numbers of records.

    Args:
        scores: this worker's scores.
        labels: their labels, 0 or 1.
        groups: the group of each record, such as its user.

    Returns:
        A record with `value`, `groups` (that count) and `skipped` (of one class).

    Raises:
        DataError: the arguments do not fit together.

    Example:
        >>> fleet.init(is_collective=True)
        >>> fleet.metrics.gauc([0.9, 0.1], [1, 0], groups=[7, 7])
        GroupedMetric(value=1.0, groups=1, skipped=0)
    """
    return _grouped.gauc(scores, labels, groups, _reduce, _gather, current().group.index)


def _has_records(name: str, records: dict[str, Any], statistics: dict[str, Any]) -> bool:
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
