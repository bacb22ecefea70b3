# SPDX-License-Identifier: Apache-2.0
"""fleet.metrics in a job with parameter servers, and in one process."""

import math
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tests.errors import error_text
from tests.served import SYNC, Job, Member, Net
from torch import nn

import fleetlight as fleet
from fleetlight.collective.group import Group
from fleetlight.errors import ConfigError, DataError
from fleetlight.fleet.collective.job import CollectiveJob
from fleetlight.fleet.job import current, set_current
from fleetlight.fleet.public import metrics
from fleetlight.roles import Role
from fleetlight.strategy import DistributedStrategy

SCORES = torch.tensor([0.9, 0.8, 0.3, 0.6, 0.2, 0.7])
LABELS, GROUPS = torch.tensor([1, 0, 1, 0, 1, 0]), torch.tensor([1, 1, 2, 1, 2, 2])


def built() -> tuple[nn.Module, list[torch.optim.Optimizer]]:
    model = Net()
    return model, [torch.optim.SGD(model.parameters(), lr=0.1)]


def part_metrics(part: slice) -> list[Any]:
    scores, labels, groups = SCORES[part], LABELS[part], GROUPS[part]
    return [
        fleet.metrics.normalised_entropy(scores, labels),
        fleet.metrics.calibration(scores, labels),
        fleet.metrics.ndcg(scores, labels, groups, k=2),
        fleet.metrics.gauc(scores, labels, groups),
        fleet.metrics.auc(scores, labels),
    ]


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    set_current(CollectiveJob(role=Role(), group=Group(), strategy=DistributedStrategy()))
    yield
    set_current(None)


@pytest.fixture
def own_job(monkeypatch: pytest.MonkeyPatch) -> threading.local:
    """Lets each thread have its own job, which is `.context`."""
    own = threading.local()
    monkeypatch.setattr(metrics, "current", lambda: getattr(own, "context", None) or current())
    return own


def test_served_workers_get_the_values_of_one_process(own_job: threading.local) -> None:
    def work(member: Member) -> list[Any]:
        own_job.context = member.context
        # worker 2 has no records
        return part_metrics([slice(0, 4), slice(4, 6), slice(6, 6)][member.index])

    alone = part_metrics(slice(None))
    assert alone[2] == fleet.metrics.ndcg(SCORES, LABELS, GROUPS, 2)
    for found in Job(built, SYNC, workers=3, servers=1).run(work):
        assert found[:2] == pytest.approx(alone[:2], rel=1e-12)
        assert found[2:] == alone[2:]


def test_a_probability_above_one_is_an_error_on_all_served_workers(
    own_job: threading.local,
) -> None:
    def work(member: Member) -> str:
        own_job.context = member.context
        return error_text(DataError, fleet.metrics.calibration, [0.5, 1.0 + member.index], [0, 1])

    first, second = Job(built, SYNC, workers=2, servers=1).run(work)
    assert "1 other worker(s) got bad input" in first
    assert "got the probability 2, expected 0 to 1" in second


def test_sums_equal_records() -> None:
    sums = {"log_loss": math.log(2) * 2, "positives": 1, "total": 2}
    assert fleet.metrics.normalised_entropy(**sums) == pytest.approx(1)
    assert fleet.metrics.normalised_entropy([0.5, 0.5], [0, 1]) == pytest.approx(1)
    assert fleet.metrics.calibration(predicted=3.0, positives=2) == 1.5


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: metrics.calibration([0.5]), "either probabilities and labels, or predicted and"),
        (lambda: metrics.calibration([0.5], [1], predicted=1), "calibration: give either"),
        (lambda: metrics.calibration(), "calibration: give either"),
        (lambda: metrics.normalised_entropy(log_loss=1, total=1), "log_loss and positives and"),
        (lambda: metrics.auc([1], [1], stat_pos=[1], stat_neg=[1]), "auc: give either scores and"),
        (lambda: metrics.ndcg([1], [1], [1], k=0), "ndcg: got k=0, expected a whole number"),
        (lambda: metrics.ndcg([1], [1], [1], k=True), "ndcg: got k=True"),
    ],
)
def test_other_arguments_are_refused(call: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        call()
