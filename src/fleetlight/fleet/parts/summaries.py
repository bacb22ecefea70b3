# SPDX-License-Identifier: Apache-2.0
"""Summaries of metrics that a job with parameter servers logs at its end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import torch

from fleetlight.observe.telemetry.catalogue import METRICS
from fleetlight.observe.telemetry.registry import Value
from fleetlight.observe.telemetry.snapshot import labelled
from fleetlight.ps.messages import ServerMetrics
from fleetlight.ps.plan import Plan
from fleetlight.strategy import ASyncConfigs


def worker_summary(metrics: Mapping[str, float]) -> str:
    """The counts of one worker."""
    return "done: " + ", ".join(METRICS[name].sentence(value) for name, value in metrics.items())


def server_summary(counted: ServerMetrics) -> str:
    """The counts of one server."""
    pushes = f"all workers have left after {counted.pushes:,} pushes"
    return f"{pushes}; {_tables([counted])}"


def server_metrics(counted: ServerMetrics) -> dict[str, Value]:
    """The metrics of one server, by the names of the catalogue."""
    rows = {labelled("table_rows", name): count for name, count in counted.rows.items()}
    nbytes = {labelled("table_bytes", name): size for name, size in counted.nbytes.items()}
    staleness = {"staleness": counted.staleness}
    return {"applied_pushes": counted.pushes, **rows, **nbytes, **staleness, **counted.durable}


def servers_summary(counted: Sequence[ServerMetrics]) -> str:
    """The counts of all servers, and the staleness of gradients."""
    pushes = max(one.pushes for one in counted)
    return f"servers: {pushes:,} pushes, {_staleness(counted)}; {_tables(counted)}"


def staleness_warning(
    counted: Sequence[ServerMetrics], plan: Plan, configs: ASyncConfigs
) -> str | None:
    """A warning if pushes arrive later than with one push in flight per worker; else None.

    Only for async mode with dense parameters on servers. Between reading a value and the arrival of
    its gradient, each worker then makes about two changes. Rows without dense parameters have a
    queue, and `staleness` is its own bound.
    """
    one_at_a_time = plan.pushes_alone and plan.workers_step_dense and bool(plan.dense)
    if not one_at_a_time or plan.staleness is not None:
        return None
    mean, bound = max((_mean(one.staleness) for one in counted), default=0.0), 2 * plan.worker_num
    if mean <= bound:
        return None
    # workers step dense parameters themselves: they push changes of these, not gradients
    what = "gradients of rows" if plan.tables else "changes of dense parameters"
    return (
        f"{what} had a staleness of {mean:.1f} on average, expected at most {bound} with "
        f"{plan.worker_num} workers: {_cause(configs)}"
    )


def mean_staleness(counted: Sequence[ServerMetrics]) -> float | None:
    """The mean staleness of all gradients so far; None where none was counted."""
    times = _times(counted)
    return _mean(times) if times.total() else None


def _cause(configs: ASyncConfigs) -> str:
    """The cause, and what to do."""
    if not configs.has_queue:
        return (
            "workers differ in speed; bound the delay with "
            'strategy.a_sync_configs = {"staleness": 1}'
        )
    name = "send_queue_size" if configs.is_set("send_queue_size") else "max_merge"
    return (
        f"strategy.a_sync_configs.{name} = {configs[name]} lets pushes wait in the queue of a "
        f"worker; remove {name}"
    )


def _mean(staleness: Mapping[int, int]) -> float:
    total = sum(staleness.values())
    return sum(late * count for late, count in staleness.items()) / total if total else 0.0


def _staleness(counted: Sequence[ServerMetrics]) -> str:
    times = _times(counted)
    if not times.total():
        return "staleness not counted"
    return f"staleness {_mean(times):.2f} on average, {max(times)} at most"


def _times(counted: Sequence[ServerMetrics]) -> Counter[int]:
    """How often each staleness occurred, on all servers."""
    times: Counter[int] = Counter()
    for one in counted:
        times.update(one.staleness)
    return times


def _tables(counted: Sequence[ServerMetrics]) -> str:
    """Rows and memory of each table, over these servers."""
    rows: Counter[str] = Counter()
    nbytes: Counter[str] = Counter()
    for one in counted:
        rows.update(one.rows)
        nbytes.update(one.nbytes)
    parts = [f"{name} {rows[name]:,} rows, {nbytes[name] / 2**20:,.1f} MiB" for name in rows]
    return "tables: " + "; ".join(parts) if parts else "no tables"


def geo_warnings(optimizers: Sequence[torch.optim.Optimizer]) -> Iterator[str]:
    """Warnings of optimizers whose quality under GeoSGD is not known."""
    for optimizer in optimizers:
        if _keeps_state(optimizer) and _has_dense(optimizer):
            yield (
                f"GeoSGD: {type(optimizer).__name__} steps dense parameters, and each worker keeps "
                "its own state of it; the quality is known for plain SGD only"
            )


def _keeps_state(optimizer: torch.optim.Optimizer) -> bool:
    if not isinstance(optimizer, torch.optim.SGD):
        return True
    return any(group["momentum"] for group in optimizer.param_groups)


def _has_dense(optimizer: torch.optim.Optimizer) -> bool:
    # the weight of a table has no elements
    return any(p.numel() for group in optimizer.param_groups for p in group["params"])
