# SPDX-License-Identifier: Apache-2.0
"""Evaluation metrics over all workers, exact: sums of counts, never averages of averages.

Every function takes what this worker has and how the workers talk: `reduce(array, op)` gives the
element-wise sum, max or min over the workers and raises on all of them where shapes or types
differ, `gather(array)` gives the 1-d arrays of all of them. All workers call the same function, and
all get the same result; bad input on one of them is an error on all, because a worker that raised
alone would leave the others waiting.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from fleetlight.errors import DataError
from fleetlight.observe.log import logger

Reduce = Callable[[NDArray[Any], str], NDArray[Any]]
Gather = Callable[[NDArray[Any]], list[NDArray[Any]]]
Number = int | float
T = TypeVar("T")


def sum(value: object, reduce: Reduce) -> Number | NDArray[Any]:
    """Element-wise sum over workers of a number, list, array or tensor."""
    return _elementwise(value, "sum", reduce)


def max(value: object, reduce: Reduce) -> Number | NDArray[Any]:
    """Element-wise maximum over workers."""
    return _elementwise(value, "max", reduce)


def min(value: object, reduce: Reduce) -> Number | NDArray[Any]:
    """Element-wise minimum over workers."""
    return _elementwise(value, "min", reduce)


def acc(correct: object, total: object, reduce: Reduce) -> float:
    """Accuracy: all that are correct (a count, or one true/false per sample) over all there are."""
    right, count = _sums("acc", correct, total, reduce)
    if right > count:
        raise DataError(f"acc: got {right:g} correct of {count:g}; expected no more than there are")
    return right / count


def mae(abs_error: object, total: object, reduce: Reduce) -> float:
    """Mean absolute error, from absolute errors (or their sum) and how many there are."""
    error, count = _sums("mae", abs_error, total, reduce)
    return error / count


def mse(sqr_error: object, total: object, reduce: Reduce) -> float:
    """Mean squared error, from squared errors (or their sum) and how many there are."""
    error, count = _sums("mse", sqr_error, total, reduce)
    return error / count


def rmse(sqr_error: object, total: object, reduce: Reduce) -> float:
    """Root of the mean squared error, from squared errors (or their sum) and how many there are."""
    error, count = _sums("rmse", sqr_error, total, reduce)
    return math.sqrt(error / count)


def auc(scores: object, labels: object, reduce: Reduce, gather: Gather) -> float:
    """Area under the ROC curve of all scores (higher: more likely 1) and labels (0 or 1).

    Exact, ties included. Each worker sends its distinct scores with their counts to all others;
    for very many scores count them in bins and use `auc_from_histograms`. With one class missing
    there is no curve: a warning names the class, and the result is 0.5.
    """
    table = on_all_workers(lambda: _score_table(scores, labels), reduce)
    tables = [part.reshape(3, -1) for part in gather(table.ravel())]
    positives, negatives = _merged(np.concatenate(tables, axis=1))[1:]
    return _area(positives, negatives)


def auc_from_histograms(stat_pos: object, stat_neg: object, reduce: Reduce) -> float:
    """Area under the ROC curve from the counts of positives and negatives per bin of score.

    Bins go from the lowest score to the highest. Scores that share a bin count as ties.
    """
    counts = on_all_workers(lambda: _histograms(stat_pos, stat_neg), reduce)
    positives, negatives = np.asarray(sum(counts, reduce))
    return _area(positives, negatives)


def as_array(value: Any) -> NDArray[Any]:
    """A number, list, array or tensor as int64 or float64."""
    if isinstance(value, (list, tuple)) and value and hasattr(value[0], "detach"):
        value = [as_array(item) for item in value]
    if hasattr(value, "detach"):  # a tensor; bfloat16 exists only in torch
        value = value.detach().cpu()
        value = (value.double() if value.is_floating_point() else value).numpy()
    try:
        array = np.asarray(value)
    except ValueError as error:
        raise DataError(f"got values of different lengths ({error}); join them first") from error
    if array.dtype.kind not in "biuf":
        raise DataError(f"got {type(value).__name__} of {array.dtype}, expected numbers")
    return array.astype(np.float64 if array.dtype.kind == "f" else np.int64)


def on_all_workers(prepare: Callable[[], T], reduce: Reduce) -> T:
    """The result of `prepare`; an error on all workers when it fails on any."""
    problem: DataError | None = None
    try:
        result = prepare()
    except DataError as error:
        problem = error
    failures = int(reduce(np.array([problem is not None], np.int64), "sum")[0])
    if problem is not None:
        raise problem
    if failures:
        raise DataError(f"{failures} other worker(s) got bad input; their messages say which")
    return result


def scores_and_labels(
    name: str, scores: object, labels: object
) -> tuple[NDArray[np.float64], NDArray[Any]]:
    """Flat arrays of one score and one label per record, no score NaN."""
    values, truths = as_array(scores).ravel().astype(np.float64), as_array(labels).ravel()
    if values.size != truths.size:
        raise DataError(
            f"{name}: got {values.size} scores for {truths.size} labels, expected one score each "
            "(that of class 1)"
        )
    if nans := np.count_nonzero(np.isnan(values)):
        raise DataError(f"{name}: got {nans} NaN among {values.size} scores")
    return values, truths


def is_positive(name: str, truths: NDArray[Any]) -> NDArray[np.bool_]:
    """True per label 1, false per label 0; no other label is allowed."""
    positive: NDArray[np.bool_] = truths == 1
    if np.any(wrong := ~positive & (truths != 0)):
        raise DataError(f"{name}: got the label {truths[wrong][0]}, expected 0 or 1")
    return positive


def warn_of_missing(name: str, counts: dict[str, Any], result: float) -> None:
    """Warn which counts are zero on all workers, so that the metric is not defined."""
    missing: Sequence[str] = [what for what, count in counts.items() if not np.any(count)]
    logger.warning(
        "%s: no %s on any worker; the result is %s", name, " and no ".join(missing), result
    )


def _elementwise(value: object, op: str, reduce: Reduce) -> Number | NDArray[Any]:
    array = on_all_workers(lambda: as_array(value), reduce)
    # Integers here and floats there, or other shapes, would be added up as garbage.
    is_float, largest, smallest_negated = reduce(
        np.array([array.dtype.kind == "f", array.size, -array.size], np.int64), "max"
    )
    if largest != -smallest_negated:
        raise DataError(
            f"{op}: got {array.size} values here, {-smallest_negated} to {largest} on other "
            "workers; expected the same number everywhere"
        )
    result = np.asarray(reduce(array.astype(np.float64 if is_float else np.int64), op))
    number: Number | NDArray[Any] = result.item() if result.ndim == 0 else result
    return number


def _sums(name: str, part: object, total: object, reduce: Reduce) -> tuple[float, float]:
    """Both values over all samples of all workers. float64 holds counts up to 2**53 exactly."""
    sums = on_all_workers(
        lambda: np.array([as_array(part).sum(), as_array(total).sum()], np.float64), reduce
    )
    value, count = reduce(sums, "sum").tolist()
    if not count > 0 or value < 0:
        raise DataError(
            f"{name}: got {value:g} over a total of {count:g} on all workers together; "
            "expected at least one sample and nothing negative"
        )
    return value, count


def _score_table(scores: object, labels: object) -> NDArray[np.float64]:
    """Rows: distinct scores in order, how many positives and negatives have them."""
    values, truths = scores_and_labels("auc", scores, labels)
    positive = is_positive("auc", truths)
    return _merged(np.stack([values, positive, ~positive]))


def _merged(table: NDArray[np.float64]) -> NDArray[np.float64]:
    """The same rows with each score once, in order, its counts added up."""
    scores, place = np.unique(table[0], return_inverse=True)
    counts = [np.bincount(place, weights=row, minlength=scores.size) for row in table[1:]]
    return np.stack([scores, *counts])


def _histograms(stat_pos: object, stat_neg: object) -> NDArray[np.float64]:
    positives, negatives = as_array(stat_pos).ravel(), as_array(stat_neg).ravel()
    if positives.size != negatives.size:
        raise DataError(
            f"auc: got {positives.size} bins of positives and {negatives.size} of negatives"
        )
    counts = np.stack([positives, negatives]).astype(np.float64)
    if not np.all(counts >= 0):
        raise DataError("auc: got a negative or NaN count in a bin, expected 0 or more")
    return counts


def _area(positives: NDArray[np.float64], negatives: NDArray[np.float64]) -> float:
    """Pairs of one positive and one negative in the right order, over all pairs; ties are half."""
    pairs = float(positives.sum() * negatives.sum())
    if not pairs:
        warn_of_missing("auc", {"positives": positives, "negatives": negatives}, 0.5)
        return 0.5
    below = np.cumsum(negatives) - negatives
    return float(positives @ (below + negatives / 2)) / pairs
