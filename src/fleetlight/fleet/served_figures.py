# SPDX-License-Identifier: Apache-2.0
"""What a job with parameter servers says of itself when it ends: sentences made of figures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from fleetlight.ps.messages import Counted


def of_worker(figures: Mapping[str, float]) -> str:
    """What one worker has counted; a name that ends in " s" is a time."""
    return "done: " + ", ".join(_figure(name, value) for name, value in figures.items())


def of_server(counted: Counted) -> str:
    """What one server says of itself."""
    pushes = f"all workers have left after {counted.pushes:,} pushes"
    return f"{pushes}; {_tables([counted])}"


def of_servers(counted: Sequence[Counted]) -> str:
    """What the servers hold together, and how old the values were that gradients came from."""
    pushes = max(one.pushes for one in counted)
    return f"servers: {pushes:,} pushes, {_staleness(counted)}; {_tables(counted)}"


def _figure(name: str, value: float) -> str:
    if name.endswith(" s"):
        return f"{name[:-2]} {value:.1f} s"
    return f"{name} {value:,.0f}"


def _staleness(counted: Sequence[Counted]) -> str:
    times: Counter[int] = Counter()
    for one in counted:
        times.update(one.staleness)
    if not times.total():
        return "staleness not counted"
    mean = sum(staleness * count for staleness, count in times.items()) / times.total()
    return f"staleness {mean:.2f} on average, {max(times)} at most"


def _tables(counted: Sequence[Counted]) -> str:
    """Rows and memory of each table, over these servers."""
    rows: Counter[str] = Counter()
    nbytes: Counter[str] = Counter()
    for one in counted:
        rows.update(one.rows)
        nbytes.update(one.nbytes)
    told = [f"{name} {rows[name]:,} rows, {nbytes[name] / 2**20:,.1f} MiB" for name in rows]
    return "tables: " + "; ".join(told) if told else "no tables"
