# SPDX-License-Identifier: Apache-2.0
"""Normalised entropy and calibration over simulated workers, compared with torch on all records."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.observe.simulated import Job, equal_on_all, errors, splits
from torch.nn.functional import binary_cross_entropy

from fleetlight.observe import evaluation
from fleetlight.observe import probability_evaluation as ours

Records = list[list[tuple[float, int]]]

probabilities_strategy = st.sampled_from([0.0, 1.0, 0.5, 1e-60]) | st.floats(0, 1)
records_strategy = splits(st.tuples(probabilities_strategy, st.integers(0, 1)))


def columns(records: list[tuple[float, int]]) -> tuple[torch.Tensor, torch.Tensor]:
    both = torch.tensor(records, dtype=torch.float64).reshape(-1, 2)
    return both[:, 0], both[:, 1]


def results(parts: Records) -> tuple[float, float]:
    def body(rank: int, reduce: evaluation.Reduce, gather: evaluation.Gather) -> Any:
        probabilities, labels = columns(parts[rank])
        return (
            ours.normalised_entropy(probabilities, labels, reduce),
            ours.calibration(probabilities, labels, reduce),
        )

    entropy, share = equal_on_all(Job(len(parts)).run(body))
    return entropy, share


def results_from_sums(parts: Records) -> tuple[float, float]:
    def body(rank: int, reduce: evaluation.Reduce, gather: evaluation.Gather) -> Any:
        probabilities, labels = columns(parts[rank])
        # per record, or as a sum
        losses = binary_cross_entropy(probabilities, labels, reduction="none")
        loss, positives = losses.sum(), labels.sum()
        return (
            ours.normalised_entropy_from_sums(loss, positives, len(labels), reduce),
            ours.calibration_from_sums(probabilities, labels, reduce),
        )

    entropy, share = equal_on_all(Job(len(parts)).run(body))
    return entropy, share


@settings(deadline=None)
@given(records_strategy)
def test_records_and_sums_equal_all_records_in_one_place(parts: Records) -> None:
    probabilities, labels = columns([record for part in parts for record in part])
    expected = [math.nan, math.nan]
    if labels.any():
        expected[1] = float(probabilities.sum() / labels.sum())
    if 0 < labels.sum() < len(labels):
        constant = labels.mean().expand_as(labels)
        loss = binary_cross_entropy(probabilities, labels)
        expected[0] = float(loss / binary_cross_entropy(constant, labels))
    for found in (results(parts), results_from_sums(parts)):
        assert found == pytest.approx(expected, rel=1e-12, nan_ok=True)


def test_values_by_hand() -> None:
    entropy, share = results([[(0.5, 1), (0.5, 0)], [], [(0.5, 0), (0.5, 0)]])
    assert entropy == pytest.approx(math.log(2) / -(math.log(0.25) / 4 + 3 * math.log(0.75) / 4))
    assert share == 2
    certain, _ = results([[(0.0, 1)], [(0.0, 0)]])
    assert certain == pytest.approx(50 / math.log(2))


@pytest.mark.parametrize("positives", [1, 10**12 - 1])
def test_a_rare_class_keeps_its_digits(positives: int) -> None:
    rate = 1e-12
    entropy = 10**12 * (-rate * math.log(rate) - (1 - rate) * math.log1p(-rate))
    result = Job(1).run(
        lambda _, reduce, __: ours.normalised_entropy_from_sums(1, positives, 10**12, reduce)
    )
    assert result == pytest.approx([1 / entropy], rel=1e-12, abs=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("truths", [[False, True], [0, 1], [0.0, 1.0]])
def test_outputs_of_models_are_accepted(dtype: torch.dtype, truths: list[Any]) -> None:
    outputs = torch.tensor([[0.25], [0.75]], dtype=dtype, requires_grad=True)
    labels = torch.tensor(truths)
    job = Job(2)
    entropies = job.run(lambda _, reduce, __: ours.normalised_entropy(outputs, labels, reduce))
    assert entropies == pytest.approx([-math.log(0.75) / math.log(2)] * 2)
    assert job.run(lambda _, reduce, __: ours.calibration(outputs, labels, reduce)) == [1, 1]


@pytest.mark.parametrize(
    ("parts", "missing"),
    [
        ([[(0.1, 1)], [(0.3, 1)]], "no negatives"),
        ([[(0.1, 0)], []], "no positives"),
        ([[], []], "no positives and no negatives"),
    ],
)
def test_one_class_is_nan_with_a_warning(
    parts: Records, missing: str, caplog: pytest.LogCaptureFixture
) -> None:
    entropy, share = results(parts)
    assert math.isnan(entropy)
    wanted = [f"normalised_entropy: {missing} on any worker; the result is nan"] * 2
    if math.isnan(share):
        wanted += ["calibration: no positives on any worker; the result is nan"] * 2
    assert sorted(caplog.messages) == sorted(wanted)
    assert math.isnan(share) == ("no positives" in missing)


@pytest.mark.parametrize("metric", [ours.normalised_entropy, ours.calibration])
@pytest.mark.parametrize(
    ("probabilities", "labels", "message"),
    [
        ([0.1, float("nan")], [0, 1], "got 1 NaN among 2 scores"),
        ([0.1, 0.2], [0, 1, 1], "got 2 scores for 3 labels"),
        ([0.1, 1.5], [0, 1], "got the probability 1.5, expected 0 to 1"),
        ([-0.5, 0.5], [0, 1], "got the probability -0.5, expected 0 to 1"),
        ([0.1, 0.2], [0, 0.5], "got the label 0.5, expected 0 or 1"),
    ],
)
def test_bad_records_are_an_error_on_all(
    metric: Any, probabilities: Any, labels: Any, message: str
) -> None:
    given = [([0.5, 0.6], [0, 1]), (probabilities, labels)]
    first, second = errors(Job(2).run(lambda rank, reduce, _: metric(*given[rank], reduce)))
    assert message in second
    assert second.startswith(metric.__name__)
    assert "1 other worker(s) got bad input" in first


@pytest.mark.parametrize(
    ("sums", "message"),
    [
        ((float("nan"), 1, 2), "got log_loss=nan, expected a finite sum"),
        ((1.0, -1, 2), "got positives=-1, expected a finite sum of at least 0"),
        ((1.0, 3, 2), "got 3 positives of 2"),
    ],
)
def test_bad_sums_are_refused(sums: tuple[Any, Any, Any], message: str) -> None:
    found = Job(2).run(lambda _, reduce, __: ours.normalised_entropy_from_sums(*sums, reduce))
    assert all(message in error for error in errors(found))
