# SPDX-License-Identifier: Apache-2.0
"""The metrics in the log at the end of a job with parameter servers."""

from typing import Any

import pytest

from fleetlight.fleet.parts.summaries import (
    mean_staleness,
    server_summary,
    servers_summary,
    staleness_warning,
    worker_summary,
)
from fleetlight.ps.messages import ServerMetrics
from fleetlight.ps.plan import ASYNC, DensePlan, InitializerPlan, Plan, RulePlan, TablePlan
from fleetlight.strategy import DistributedStrategy

MIB = 2**20
TABLE = TablePlan("wide", 2, RulePlan("sgd", {}), InitializerPlan("zeros"), 0, 0)
DENSE = DensePlan("deep", (2,), "float32", 0, 0)


def test_worker_line_has_counts_and_times() -> None:
    metrics = {"steps": 1200.0, "rows_read_ahead": 7.0, "push_wait_seconds": 0.04}
    assert worker_summary(metrics) == "done: steps 1,200, prefetched rows 7, waited 0.0 s"


def test_server_line_has_pushes_and_tables() -> None:
    counted = ServerMetrics(1200, {"wide": 3000, "deep": 5}, {"wide": 3 * MIB, "deep": 0}, {})
    assert server_summary(counted) == (
        "all workers have left after 1,200 pushes; "
        "tables: wide 3,000 rows, 3.0 MiB; deep 5 rows, 0.0 MiB"
    )


def test_metrics_sum_servers_and_average_staleness_over_pushes() -> None:
    one = ServerMetrics(4, {"deep": 1000}, {"deep": MIB}, {0: 3, 2: 1})
    other = ServerMetrics(4, {"deep": 500}, {"deep": MIB}, {0: 1, 4: 1})
    assert servers_summary([one, other]) == (
        "servers: 4 pushes, staleness 1.00 on average, 4 at most; tables: deep 1,500 rows, 2.0 MiB"
    )


def test_metrics_without_pushes_and_tables() -> None:
    line = servers_summary([ServerMetrics(0, {}, {}, {})])
    assert line == "servers: 0 pushes, staleness not counted; no tables"


def warning_for(
    dense: bool = True, tables: bool = True, staleness: int | None = None, **settings: Any
) -> str | None:
    """The warning for gradients with a staleness of 5.5, with two workers."""
    configs = DistributedStrategy(a_sync_configs=settings).a_sync_configs
    plan = Plan(
        mode=ASYNC, worker_num=2, server_num=1, seed=0, tables=[TABLE] if tables else [],
        dense=[DENSE] if dense else [], optimizers=[], staleness=staleness,
        serves_dense=configs.dense == "servers",
    )  # fmt: skip
    usual, late = ServerMetrics(9, {}, {}, {3: 8, 9: 1}), ServerMetrics(9, {}, {}, {4: 1, 6: 3})
    assert staleness_warning([usual], plan, configs) is None
    assert staleness_warning([], plan, configs) is None
    return staleness_warning([usual, late], plan, configs)


@pytest.mark.parametrize(
    ("configs", "cause"),
    [
        ({}, "workers differ in speed; bound the delay with"),
        ({"send_queue_size": 16}, "a_sync_configs.send_queue_size = 16 lets pushes wait"),
        ({"max_merge": 3}, "a_sync_configs.max_merge = 3 lets pushes wait"),
    ],
)
def test_warning_names_the_cause_of_excess_staleness(configs: dict[str, Any], cause: str) -> None:
    warning = warning_for(**configs)
    late = (
        "gradients of rows had a staleness of 5.5 on average, expected at most 4 with 2 workers: "
    )
    assert warning is not None
    assert warning.partition(": ")[0] + ": " == late
    assert cause in warning
    assert ("differ in speed" in warning) is not configs


def test_warning_without_tables_names_dense_parameters() -> None:
    assert str(warning_for(tables=False)).startswith(
        "changes of dense parameters had a staleness of 5.5"
    )


@pytest.mark.parametrize("options", [{"dense": False}, {"staleness": 9}])
def test_no_warning_when_no_bound_applies(options: dict[str, Any]) -> None:
    assert warning_for(**options) is None


def test_no_warning_when_workers_average_dense_gradients() -> None:
    configs = DistributedStrategy(a_sync_configs={"dense": "allreduce"}).a_sync_configs
    plan = Plan(
        mode=ASYNC, worker_num=2, server_num=1, seed=0, tables=[TABLE], dense=[DENSE],
        optimizers=[], serves_dense=False,
    )  # fmt: skip
    assert staleness_warning([ServerMetrics(9, {}, {}, {9: 9})], plan, configs) is None


def test_mean_staleness_is_that_of_all_servers() -> None:
    none = ServerMetrics(4, {}, {}, {})
    assert mean_staleness([none]) is None
    assert mean_staleness([none, ServerMetrics(4, {}, {}, {0: 3, 4: 1})]) == 1.0
