# SPDX-License-Identifier: Apache-2.0
"""Metrics of predicted probabilities over all workers: normalised entropy and calibration.

Each worker reduces its records to a few sums, which are added up over the workers, as in `metrics`.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from fleetlight.errors import DataError
from fleetlight.observe.evaluation import (
    Reduce,
    as_array,
    is_positive,
    on_all_workers,
    scores_and_labels,
    warn_of_missing,
)

#: the lowest logarithm of a probability, as in torch's binary_cross_entropy
_MIN_LOG = -100.0


def normalised_entropy(probabilities: object, labels: object, reduce: Reduce) -> float:
    """Mean log loss over the entropy of the base rate; below 1 is better than a constant.

    Logarithms of probabilities are at least -100. With one class missing the entropy is zero: a
    warning names the class, and the result is NaN.
    """
    sums = on_all_workers(lambda: _loss_sums(probabilities, labels), reduce)
    return _loss_over_entropy(reduce(sums, "sum"))


def normalised_entropy_from_sums(
    log_loss: object, positives: object, total: object, reduce: Reduce
) -> float:
    """The same from the sum of log losses, the number of positives and that of records."""
    name = "normalised_entropy"
    sums = on_all_workers(
        lambda: _sums(name, log_loss=log_loss, positives=positives, total=total), reduce
    )
    return _loss_over_entropy(reduce(sums, "sum"))


def calibration(probabilities: object, labels: object, reduce: Reduce) -> float:
    """Sum of probabilities over the number of positives; above 1 predicts too many.

    Without positives the result is NaN, with a warning.
    """
    sums = on_all_workers(lambda: _predicted_and_positives(probabilities, labels), reduce)
    return _predicted_over_positives(reduce(sums, "sum"))


def calibration_from_sums(predicted: object, positives: object, reduce: Reduce) -> float:
    """The same from the sum of probabilities and the number of positives."""
    sums = on_all_workers(
        lambda: _sums("calibration", predicted=predicted, positives=positives), reduce
    )
    return _predicted_over_positives(reduce(sums, "sum"))


def _loss_sums(probabilities: object, labels: object) -> NDArray[np.float64]:
    values, positive = _checked("normalised_entropy", probabilities, labels)
    with np.errstate(divide="ignore"):
        logs = np.where(positive, np.log(values), np.log1p(-values))
    losses = -np.maximum(logs, _MIN_LOG)
    return np.array([losses.sum(), positive.sum(), positive.size], np.float64)


def _predicted_and_positives(probabilities: object, labels: object) -> NDArray[np.float64]:
    values, positive = _checked("calibration", probabilities, labels)
    return np.array([values.sum(), positive.sum()], np.float64)


def _checked(
    name: str, probabilities: object, labels: object
) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    values, truths = scores_and_labels(name, probabilities, labels)
    if np.any(wrong := (values < 0) | (values > 1)):
        raise DataError(
            f"{name}: got the probability {values[wrong][0]:g}, expected 0 to 1; "
            "pass outputs of a linear layer through torch.sigmoid"
        )
    return values, is_positive(name, truths)


def _sums(name: str, **parts: object) -> NDArray[np.float64]:
    sums = {what: float(as_array(part).sum()) for what, part in parts.items()}
    for what, value in sums.items():
        if not 0 <= value < math.inf:
            raise DataError(f"{name}: got {what}={value:g}, expected a finite sum of at least 0")
    if sums["positives"] > sums.get("total", math.inf):
        raise DataError(
            f"{name}: got {sums['positives']:g} positives of {sums['total']:g}; "
            "expected no more than there are"
        )
    return np.array(list(sums.values()))


def _loss_over_entropy(sums: NDArray[np.float64]) -> float:
    loss, positives, total = sums.tolist()
    negatives = total - positives
    if not positives or not negatives:
        counts = {"positives": positives, "negatives": negatives}
        warn_of_missing("normalised_entropy", counts, math.nan)
        return math.nan
    entropy = -positives * _log_share(positives, negatives) - negatives * _log_share(
        negatives, positives
    )
    return float(loss / entropy)


def _log_share(part: float, rest: float) -> float:
    """Logarithm of part / (part + rest), with all digits where it is close to 0."""
    total = part + rest
    return math.log1p(-rest / total) if rest < part else math.log(part / total)


def _predicted_over_positives(sums: NDArray[np.float64]) -> float:
    predicted, positives = sums.tolist()
    if not positives:
        warn_of_missing("calibration", {"positives": positives}, math.nan)
        return math.nan
    return float(predicted / positives)
