# SPDX-License-Identifier: Apache-2.0
"""NDCG and grouped AUC over simulated workers, compared with scikit-learn group by group."""

import math
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
from fleetlight.observe import grouped_evaluation as ours
from fleetlight.observe.evaluation import Gather, Reduce
from fleetlight.observe.grouped_evaluation import GroupedMetric

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
def test_bad_input_of_one_worker_is_an_error_on_all(
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
