# SPDX-License-Identifier: Apache-2.0
"""Metrics over simulated workers, compared with NumPy and scikit-learn on all samples."""

import math
import subprocess
import sys
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import ndcg_score, roc_auc_score
from tests.observe.simulated import Job, equal_on_all, errors, scores_strategy, splits

from fleetlight.errors import MembershipError
from fleetlight.observe import evaluation
from fleetlight.observe import grouped_evaluation as ours
from fleetlight.observe.evaluation import Gather, Reduce
from fleetlight.observe.grouped_evaluation import GroupedMetric

numbers = st.floats(-1e6, 1e6, width=32)


def auc_of(parts: list[list[tuple[float, int]]]) -> float:
    def body(rank: int, reduce: evaluation.Reduce, gather: evaluation.Gather) -> float:
        pairs = np.array(parts[rank], np.float64).reshape(-1, 2)
        return evaluation.auc(pairs[:, 0], pairs[:, 1], reduce, gather)

    result: float = equal_on_all(Job(len(parts)).run(body))
    return result


@settings(deadline=None)
@given(splits(st.tuples(scores_strategy, st.integers(0, 1))))
def test_auc_equals_that_of_all_samples(parts: list[list[tuple[float, int]]]) -> None:
    pairs = np.array([pair for part in parts for pair in part])
    if 0 < pairs[:, 1].sum() < len(pairs):
        expected = roc_auc_score(pairs[:, 1], pairs[:, 0])
    else:
        expected = 0.5
    assert auc_of(parts) == pytest.approx(expected, abs=1e-12)


def test_auc_counts_ties_as_half() -> None:
    assert auc_of([[(0.5, 1)], [(0.5, 0)]]) == 0.5
    assert auc_of([[(0.5, 1), (0.5, 0)], [(0.9, 1), (0.5, 1)]]) == (0.5 + 0.5 + 1) / 3


def test_auc_accepts_outputs_of_models() -> None:
    scores = torch.tensor([[0.25], [0.75], [0.5]], dtype=torch.bfloat16, requires_grad=True)
    labels = torch.tensor([False, True, True])
    results = Job(2).run(lambda _, reduce, gather: evaluation.auc(scores, labels, reduce, gather))
    assert results == [1.0, 1.0]


@pytest.mark.parametrize(
    ("parts", "missing"),
    [
        ([[(0.1, 1)], [(0.3, 1)]], "no negatives"),
        ([[(0.1, 0)], []], "no positives"),
        ([[], []], "no positives and no negatives"),
    ],
)
def test_auc_without_both_classes_is_one_half_with_a_warning(
    parts: list[list[tuple[float, int]]], missing: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert auc_of(parts) == 0.5
    assert caplog.messages == [f"auc: {missing} on any worker; the result is 0.5"] * 2


@pytest.mark.parametrize(
    ("scores", "labels", "message"),
    [
        ([0.1, float("nan"), float("nan")], [0, 1, 1], "got 2 NaN among 3 scores"),
        ([0.1, 0.2], [0, 1, 1], "got 2 scores for 3 labels"),
        ([0.1, 0.2], [0, 2], "got the label 2, expected 0 or 1"),
        ([0.1, 0.2], [0, float("nan")], "got the label nan, expected 0 or 1"),
        (["a", "b"], [0, 1], "expected numbers"),
        ([[1, 2], [3]], [0, 1], "different lengths"),
    ],
)
def test_bad_input_of_one_worker_is_an_error_on_all(scores: Any, labels: Any, message: str) -> None:
    given = [([0.5, 0.6], [0, 1]), (scores, labels), ([0.5], [1])]
    first, second, third = errors(
        Job(3).run(lambda rank, reduce, gather: evaluation.auc(*given[rank], reduce, gather))
    )
    assert message in second
    assert first == third == "1 other worker(s) got bad input; their messages say which"


@settings(deadline=None)
@given(splits(st.tuples(st.integers(0, 7), st.integers(0, 1))))
def test_auc_from_histograms_equals_that_of_the_bins(parts: list[list[tuple[int, int]]]) -> None:
    def histogram(rank: int, label: int) -> np.ndarray:
        return np.bincount([b for b, y in parts[rank] if y == label], minlength=8)

    def body(rank: int, reduce: evaluation.Reduce, gather: evaluation.Gather) -> float:
        return evaluation.auc_from_histograms(histogram(rank, 1), [histogram(rank, 0)], reduce)

    expected = auc_of([[(float(b), y) for b, y in part] for part in parts])
    assert equal_on_all(Job(len(parts)).run(body)) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(
    ("positives", "negatives", "message"),
    [
        ([1, 2], [1, 2, 3], "got 2 bins of positives and 3 of negatives"),
        ([1, -2], [1, 2], "negative or NaN count"),
        ([1, 2], [1, float("nan")], "negative or NaN count"),
    ],
)
def test_bad_histograms_are_refused(positives: Any, negatives: Any, message: str) -> None:
    results = Job(2).run(
        lambda _, reduce, gather: evaluation.auc_from_histograms(positives, negatives, reduce)
    )
    assert all(message in error for error in errors(results))


ELEMENTWISE: list[tuple[Callable[..., Any], Callable[..., Any]]] = [
    (evaluation.sum, np.sum),
    (evaluation.max, np.max),
    (evaluation.min, np.min),
]


@pytest.mark.parametrize(("ours", "numpys"), ELEMENTWISE)
@settings(deadline=None)
@given(
    rows=st.lists(
        st.lists(st.integers(-(2**60), 2**60), min_size=3, max_size=3), min_size=1, max_size=4
    )
)
def test_integers_are_exact(ours: Any, numpys: Any, rows: list[list[int]]) -> None:
    result = equal_on_all(Job(len(rows)).run(lambda rank, reduce, _: ours(rows[rank], reduce)))
    assert result.dtype == np.int64
    assert result.tolist() == numpys(rows, axis=0).tolist()


@pytest.mark.parametrize(("ours", "numpys"), ELEMENTWISE)
def test_arrays_keep_their_shape_and_numbers_their_type(ours: Any, numpys: Any) -> None:
    grids = np.random.default_rng(0).normal(size=(3, 2, 5)).astype(np.float32)
    result = equal_on_all(
        Job(3).run(lambda rank, reduce, _: ours(torch.from_numpy(grids[rank]), reduce))
    )
    np.testing.assert_array_equal(result, numpys(grids.astype(np.float64), axis=0))
    number = Job(3).run(lambda rank, reduce, _: ours(rank + 2, reduce))[0]
    assert (number, type(number)) == (int(numpys([2, 3, 4])), int)


def test_mixed_integers_and_floats_become_floats() -> None:
    values = [2, 0.5, torch.tensor(1, dtype=torch.uint8)]
    results = Job(3).run(lambda rank, reduce, _: evaluation.sum(values[rank], reduce))
    assert results == [3.5] * 3
    assert type(results[0]) is float


def test_float32_is_added_in_float64() -> None:
    values = [np.float32(2**24), np.float32(1)]
    assert Job(2).run(lambda rank, reduce, _: evaluation.sum(values[rank], reduce))[0] == 2**24 + 1
    both = np.array(values)
    assert Job(1).run(lambda _, reduce, __: evaluation.mae(both, 1, reduce)) == [2**24 + 1]


def test_a_list_of_tensors_is_summed() -> None:
    losses = [torch.tensor(1.5, requires_grad=True), torch.tensor(2.5)]
    assert Job(1).run(lambda _, reduce, __: evaluation.sum(losses, reduce))[0].tolist() == [
        1.5,
        2.5,
    ]


def test_different_sizes_are_an_error_on_all() -> None:
    results = Job(3).run(lambda rank, reduce, _: evaluation.sum([1] * (rank + 1), reduce))
    assert all("1 to 3" in error for error in errors(results))


def test_values_that_are_not_numbers_are_refused() -> None:
    values = [1, "one"]
    results = errors(Job(2).run(lambda rank, reduce, _: evaluation.sum(values[rank], reduce)))
    assert "got str of <U3, expected numbers" in results[1]


@settings(deadline=None)
@given(splits(st.tuples(numbers, st.booleans())))
def test_means_are_over_samples_not_over_workers(parts: list[list[tuple[float, bool]]]) -> None:
    def body(rank: int, reduce: evaluation.Reduce, gather: evaluation.Gather) -> list[float]:
        values = torch.tensor([value for value, _ in parts[rank]], dtype=torch.float32)
        right, total = [is_right for _, is_right in parts[rank]], len(parts[rank])
        return [
            evaluation.acc(right, total, reduce),
            evaluation.mae(values.abs(), total, reduce),
            evaluation.rmse(float((values.double() ** 2).sum()), torch.tensor([total]), reduce),
        ]

    values = np.array([value for part in parts for value, _ in part])
    right = np.array([is_right for part in parts for _, is_right in part])
    expected = [right.mean(), np.abs(values).mean(), np.sqrt((values**2).mean())]
    np.testing.assert_allclose(equal_on_all(Job(len(parts)).run(body)), expected, rtol=1e-12)


def test_counts_beyond_float32_are_exact() -> None:
    correct, total = 2**40 + 1, 2**41
    result = Job(2).run(
        lambda rank, reduce, _: evaluation.acc(correct * rank, total * rank, reduce)
    )
    assert result == [correct / total] * 2


@pytest.mark.parametrize("metric", [evaluation.acc, evaluation.mae, evaluation.rmse])
@pytest.mark.parametrize(("value", "total"), [(0, 0), (-1, 3), (1, -1)])
def test_no_samples_or_negative_values_are_refused(metric: Any, value: int, total: int) -> None:
    results = Job(2).run(lambda _, reduce, __: metric(value, total, reduce))
    assert all(
        metric.__name__ in error and "at least one sample" in error for error in errors(results)
    )


def test_more_correct_than_samples_are_refused() -> None:
    results = Job(2).run(lambda _, reduce, __: evaluation.acc(3, 2, reduce))
    assert all("acc: got 6 correct of 4" in error for error in errors(results))


def test_importing_metrics_does_not_import_torch() -> None:
    code = "import sys, fleetlight.observe.evaluation; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


# -- NDCG and grouped AUC over simulated workers, compared with scikit-learn group by group


#: score, label, group
Records = list[tuple[float, float, int]]

groups_strategy = st.integers(0, 4) | st.sampled_from([-1, 2**63 - 1, -(2**63)])
gains_strategy = st.integers(0, 3) | st.floats(0, 1e6, width=32, allow_subnormal=False)


def columns(records: Records) -> list[np.ndarray]:
    score, label, group = zip(*records, strict=True) if records else ((), (), ())
    return [np.array(score, float), np.array(label, float), np.array(group, np.int64)]


def by_group(parts: list[Records]) -> list[tuple[np.ndarray, np.ndarray]]:
    score, label, group = columns([record for part in parts for record in part])
    return [(score[group == one], label[group == one]) for one in np.unique(group)]


def result_of(metric: Callable[..., GroupedMetric], parts: list[Records], *k: Any) -> GroupedMetric:
    def body(rank: int, reduce: Reduce, gather: Gather) -> GroupedMetric:
        return metric(*columns(parts[rank]), *k, reduce, gather, rank)

    results = Job(len(parts)).run(body)
    found = equal_on_all([getattr(result, "value", result) for result in results])
    assert [result.value for result in results] == pytest.approx([found] * len(parts), nan_ok=True)
    first: GroupedMetric = results[0]
    assert {(one.groups, one.skipped) for one in results} == {(first.groups, first.skipped)}
    return first


def sent_in_rounds_of(number: int) -> Any:
    return mock.patch.object(ours, "ROUND_BYTES", number)


@settings(deadline=None)
@given(
    splits(st.tuples(scores_strategy, gains_strategy, groups_strategy), min_size=0),
    st.none() | st.integers(1, 6),
    st.sampled_from([1, 200, ours.ROUND_BYTES]),
)
def test_ndcg_is_the_mean_of_all_groups(parts: list[Records], k: int | None, sent: int) -> None:
    counted = [(score, label) for score, label in by_group(parts) if label.any()]
    # scikit-learn refuses one record; its order is always the best
    each = [
        ndcg_score(label[None], score[None], k=k) if label.size > 1 else 1.0
        for score, label in counted
    ]
    with sent_in_rounds_of(sent):
        found = result_of(ours.ndcg, parts, k)
    assert found.value == pytest.approx(np.mean(each) if each else math.nan, rel=1e-9, nan_ok=True)
    assert (found.groups, found.skipped) == (len(each), len(by_group(parts)) - len(each))


@settings(deadline=None)
@given(
    splits(st.tuples(scores_strategy, st.integers(0, 1), groups_strategy), min_size=0),
    st.sampled_from([1, 200, ours.ROUND_BYTES]),
)
def test_gauc_is_weighted_with_the_records_of_a_group(parts: list[Records], sent: int) -> None:
    counted = [(score, label) for score, label in by_group(parts) if 0 < label.sum() < label.size]
    each = [roc_auc_score(label, score) for score, label in counted]
    sizes = [label.size for _, label in counted]
    with sent_in_rounds_of(sent):
        found = result_of(ours.gauc, parts)
    expected = np.average(each, weights=sizes) if each else math.nan
    assert found.value == pytest.approx(expected, rel=1e-12, nan_ok=True)
    assert (found.groups, found.skipped) == (len(each), len(by_group(parts)) - len(each))


def test_values_by_hand() -> None:
    parts: list[Records] = [[(0.9, 0, 7), (0.2, 1, 8)], [(0.1, 1, 7), (0.1, 0, 8)], [(0.5, 0, 9)]]
    assert result_of(ours.ndcg, parts, None) == GroupedMetric((1 / math.log2(3) + 1) / 2, 2, 1)
    assert result_of(ours.ndcg, parts, 1) == GroupedMetric(0.5, 2, 1)
    assert result_of(ours.gauc, parts) == GroupedMetric(0.5, 2, 1)


def test_ties_share_their_gains() -> None:
    parts: list[Records] = [[(0.5, 3, 1)], [(0.5, 0, 1)], [(math.inf, 0, 1), (-math.inf, 0, 1)]]
    expected = 1.5 * (1 / math.log2(3) + 1 / math.log2(4)) / 3
    assert result_of(ours.ndcg, parts, 3).value == pytest.approx(expected)
    assert result_of(ours.gauc, [[(-0.0, 1, 1)], [(0.0, 0, 1)]]).value == 0.5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_outputs_of_models_are_accepted(dtype: torch.dtype) -> None:
    scores = torch.tensor([[0.25], [0.75], [0.5]], dtype=dtype, requires_grad=True)
    labels, groups = torch.tensor([False, True, True]), torch.tensor([3, 3, 4], dtype=torch.int32)

    def body(rank: int, reduce: Reduce, gather: Gather) -> Any:
        ndcg = ours.ndcg(scores, labels, groups, None, reduce, gather, rank)
        return ndcg, ours.gauc(scores, labels, groups.tolist(), reduce, gather, rank)

    assert Job(2).run(body) == [(GroupedMetric(1.0, 2, 0), GroupedMetric(1.0, 1, 1))] * 2


def test_each_worker_stores_a_share() -> None:
    records = np.zeros(4000, ours._RECORD)
    records["group"] = np.arange(4000) * 4

    def body(rank: int, reduce: Reduce, gather: Gather) -> int:
        return len(ours._own_groups(records[rank::4], gather, rank)[0])

    stored = Job(4).run(body)
    assert sum(stored) == 4000
    assert max(stored) < 1200


@pytest.mark.parametrize(
    ("metric", "why"), [(ours.ndcg, "a label above 0"), (ours.gauc, "records of both classes")]
)
def test_no_group_that_counts_is_nan_with_a_warning(
    metric: Any, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    k = [None] if metric is ours.ndcg else []
    for parts, skipped in (([[(0.5, 0, 1)], [(0.5, 0, 2)]], 2), ([[], []], 0)):
        found = result_of(metric, parts, *k)
        assert math.isnan(found.value)
        assert (found.groups, found.skipped) == (0, skipped)
    name = metric.__name__
    assert caplog.messages == [f"{name}: no group on any worker has {why}; the result is nan"] * 4


@pytest.mark.parametrize(
    ("scores", "labels", "groups", "message"),
    [
        ([0.1, math.nan], [0, 1], [1, 1], "got 1 NaN among 2 scores"),
        ([0.1, 0.2], [0, 1, 1], [1, 1], "got 2 scores for 3 labels"),
        ([0.1, 0.2], [0, 1], [1], "got 1 group ids for 2 scores"),
        ([0.1, 0.2], [0, 1], [1.0, 2.0], "group ids: got floats, expected whole numbers"),
        ([0.1, 0.2], [0, 1], ["anna", "bert"], "stable_hash makes ids of texts"),
        ([0.1, 0.2], [0, -1], [1, 1], "got the label -1, expected"),
        ([0.1, 0.2], [0, math.inf], [1, 1], "got the label inf, expected"),
        ([0.1, 0.2], [0, math.nan], [1, 1], "got the label nan, expected"),
    ],
)
def test_bad_groups_of_one_worker_are_an_error_on_all(
    scores: Any, labels: Any, groups: Any, message: str
) -> None:
    given = [([0.5], [1], [1]), (scores, labels, groups)]

    def ndcg(rank: int, reduce: Reduce, gather: Gather) -> Any:
        return ours.ndcg(*given[rank], None, reduce, gather, rank)

    def gauc(rank: int, reduce: Reduce, gather: Gather) -> Any:
        return ours.gauc(*given[rank], reduce, gather, rank)

    for metric in (ndcg, gauc):
        first, second = errors(Job(2).run(metric))
        assert message in second
        assert second.startswith(metric.__name__)
        assert "1 other worker(s) got bad input" in first


def test_gains_are_no_labels_of_gauc() -> None:
    found = Job(1).run(lambda rank, *talk: ours.gauc([0.1, 0.2], [0, 2], [1, 1], *talk, rank))
    assert "gauc: got the label 2, expected 0 or 1" in errors(found)[0]


def test_remaining_workers_own_the_groups_of_a_lost_one() -> None:
    def body(rank: int, reduce: Reduce, gather: Gather) -> GroupedMetric:
        records = np.arange(20) % 2, np.arange(20) % 2, np.arange(20) // 2
        return ours.gauc(*records, reduce, gather, rank * 2)

    assert Job(2).run(body) == [GroupedMetric(1.0, 10, 0)] * 2


def test_a_worker_lost_during_the_exchange_is_an_error() -> None:
    def body(rank: int, reduce: Reduce, gather: Gather) -> Any:
        def reduce_without_one(array: np.ndarray, op: str) -> np.ndarray:
            return reduce(array, op) / (2 if array.dtype == np.float64 else 1)

        return ours.gauc([0.1, 0.2], [0, 1], [1, 1], reduce_without_one, gather, rank)

    for error in Job(2).run(body):
        assert isinstance(error, MembershipError)
        assert "got the groups of 1 workers, expected 2: a worker was lost" in str(error)
