# SPDX-License-Identifier: Apache-2.0
"""Forked workers know their rank; a failure is reported and ends the others."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from typing import Any

import pytest

from benchmarks import forked, jobs


def identity(options: Mapping[str, Any]) -> dict[str, Any]:
    return {"rank": int(os.environ["RANK"]), "given": options["value"], "cpu_seconds": 0.0}


def fail_or_stay(options: Mapping[str, Any]) -> dict[str, Any]:
    if os.environ["RANK"] == "1":
        raise ValueError("this went wrong")
    threading.Event().wait(60)
    return {}


def die(options: Mapping[str, Any]) -> dict[str, Any]:
    os._exit(3)


@pytest.mark.long
@pytest.mark.multiprocess
def test_results_are_in_the_order_of_the_workers() -> None:
    run = forked.run("job", identity, {"value": [1, 2]}, 3)
    assert [result["rank"] for result in run.results] == [0, 1, 2]
    assert all(result["given"] == [1, 2] for result in run.results)


@pytest.mark.multiprocess
def test_a_failure_is_reported_without_waiting_for_others() -> None:
    with pytest.raises(jobs.BenchmarkError, match=r"worker 1 failed(?s:.)*this went wrong"):
        forked.run("job", fail_or_stay, {}, 2)


@pytest.mark.multiprocess
def test_a_worker_that_dies_is_reported() -> None:
    with pytest.raises(jobs.BenchmarkError, match="worker 0 exited without a result"):
        forked.run("job", die, {}, 1)
