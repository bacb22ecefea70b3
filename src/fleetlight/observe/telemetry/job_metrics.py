# SPDX-License-Identifier: Apache-2.0
"""The metrics of a whole job, from those of its processes. Pure.

Workers that log a value give its mean, rates of samples add up, and so do the rows of servers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from fleetlight.observe.telemetry.catalogue import STEP_PARTS, step_metric
from fleetlight.observe.telemetry.history import Series
from fleetlight.observe.telemetry.snapshot import split_key

#: how old the newest metrics of a process may be
FRESH_S = 10.0


def job_metrics(
    series: Mapping[str, Series], now: float, span_s: float
) -> tuple[int, dict[str, float]]:
    """The step of the job, and its metrics; rates are those of the last `span_s` seconds."""
    fresh = {
        name: one
        for name, one in series.items()
        if one.times and one.times[-1] >= now - max(FRESH_S, span_s)
    }
    workers = [one for name, one in fresh.items() if name.startswith("worker.")]
    servers = [one for name, one in fresh.items() if name.startswith("server.")]
    found = {
        "samples_per_second": math.fsum(_rates(workers, "samples", span_s)),
        "steps_per_second": _mean(_rates(workers, "steps", span_s)),
        "skipped_steps": max((one.last("skipped_steps") or 0.0 for one in workers), default=0.0),
        **_logged(workers),
        **_step_shares(workers, span_s),
        # one process with a server inside has the rows as well
        **_rows(servers or workers),
        **_staleness(servers or workers),
    }
    for name, one in fresh.items():
        if (resident := one.last("resident_bytes")) is not None:
            found[f"resident_bytes/{name}"] = resident
    steps = [one.last("steps") or 0.0 for one in workers]
    return int(max(steps, default=0.0)), found


def _rates(series: Iterable[Series], key: str, span_s: float) -> list[float]:
    found = (one.rate(key, span_s) for one in series)
    return [one for one in found if one is not None]


def _mean(values: Iterable[float]) -> float:
    some = list(values)
    return math.fsum(some) / len(some) if some else 0.0


def _logged(workers: Iterable[Series]) -> dict[str, float]:
    values: dict[str, list[float]] = {}
    for one in workers:
        for key, value in one.newest.items():
            name, label = split_key(key)
            if name == "logged":
                values.setdefault(label, []).append(value)
    # fsum refuses both infinities; their mean is NaN
    return {name: sum(some) / len(some) for name, some in values.items()}


def _step_shares(workers: Iterable[Series], span_s: float) -> dict[str, float]:
    """The share of each part in the time of steps."""
    seconds = {part: math.fsum(_rates(workers, step_metric(part), span_s)) for part in STEP_PARTS}
    whole = math.fsum(seconds.values())
    return {f"step_share/{part}": one / whole for part, one in seconds.items()} if whole else {}


def _rows(servers: Iterable[Series]) -> dict[str, float]:
    found: dict[str, float] = {}
    for one in servers:
        for key in one.columns:
            name, label = split_key(key)
            if name in ("table_rows", "table_bytes") and (value := one.last(key)) is not None:
                found[f"{name}/{label}"] = found.get(f"{name}/{label}", 0.0) + value
    return found


def _staleness(servers: Iterable[Series]) -> dict[str, float]:
    """The mean over all pushes since the servers were started."""
    total = times = 0
    for one in servers:
        for number, count in one.counts.get("staleness", {}).items():
            total, times = total + number * count, times + count
    return {"staleness": total / times} if times else {}
