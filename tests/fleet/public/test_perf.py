# SPDX-License-Identifier: Apache-2.0
"""`fleet.collective_perf`: the time of a collective operation, and whether it is too long."""

import logging
from typing import Any

import pytest
from tests.workers import WorkerFailedError, run_workers

import fleetlight as fleet
from fleetlight.collective.group import Group
from fleetlight.errors import ConfigError
from fleetlight.fleet.collective.job import CollectiveJob
from fleetlight.fleet.job import set_current
from fleetlight.fleet.public.perf import DEFAULT_SIZES
from fleetlight.roles import Role
from fleetlight.strategy import DistributedStrategy


@pytest.fixture
def alone() -> Any:
    set_current(CollectiveJob(role=Role(), group=Group(), strategy=DistributedStrategy()))
    yield
    set_current(None)


@pytest.mark.usefixtures("alone")
def test_single_worker_measures_zero_seconds() -> None:
    assert fleet.collective_perf("allreduce") == dict.fromkeys(DEFAULT_SIZES, 0.0)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        pytest.param(("allreduc",), "did you mean 'allreduce'", id="type"),
        pytest.param((3,), "got comm_type=3", id="number"),
        pytest.param(("broadcast", 0), "round=0, expected an integer of 1", id="no round"),
        pytest.param(("broadcast", True), "round=True", id="true"),
        pytest.param(("broadcast", 5, {0: 1}), "size 0, expected a number of bytes", id="no bytes"),
        pytest.param(("broadcast", 5, {1.5: 1}), "size 1.5", id="half a byte"),
        pytest.param(("broadcast", 5, {8: 0}), "got 0 for 8 bytes", id="no time"),
        pytest.param(("broadcast", 5, {8: "1"}), "got '1' for 8 bytes", id="text"),
        pytest.param(("broadcast", 5, [8]), "size_and_time is a list", id="list"),
    ],
)
def test_wrong_arguments_are_refused(arguments: Any, complaint: str) -> None:
    with pytest.raises(ConfigError, match=f"collective_perf: .*{complaint}"):
        fleet.collective_perf(*arguments)


def measured() -> tuple[list[dict[int, float]], list[str]]:
    records: list[str] = []
    handler = logging.Handler(logging.INFO)
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("fleetlight").addHandler(handler)
    names = ["allreduce", "broadcast", "allgather", "reduce_scatter"]
    answers = [fleet.collective_perf(name, 3, {1000: 1e-9, 1 << 16: 60}) for name in names]
    return answers, [text for text in records if text.startswith("collective_perf")]


@pytest.mark.multiprocess
def test_all_operations_are_measured_on_three_workers() -> None:
    (answers, lines), *others = run_workers(measured, 3)
    for answer in answers:
        assert list(answer) == [1000, 1 << 16]
        assert all(seconds > 0 for seconds in answer.values())
    assert [other for other, _ in others] == [answers, answers]
    assert [silent for _, silent in others] == [[], []]
    line, warned = lines[:2]
    assert line.startswith("collective_perf: allreduce: 1000 bytes ")
    assert ", 64 KiB " in line
    assert warned.startswith("collective_perf: allreduce of 1000 bytes takes ")
    assert warned.endswith(" more than the 1e-06 ms expected")
    assert len(lines) == 8


def differing() -> None:
    fleet.collective_perf("allreduce", 2, {64 * (1 + fleet.worker_index()): 1})


@pytest.mark.multiprocess
def test_workers_that_measure_differently_are_named() -> None:
    with pytest.raises(WorkerFailedError, match=r"worker 0 measures .*64.*, worker 1 .*128"):
        run_workers(differing)
