# SPDX-License-Identifier: Apache-2.0
"""Tables of the servers: rows, growth, balance, and when memory is full. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from fleetlight.dashboard.view.process_view import ProcessView
from fleetlight.observe.telemetry.snapshot import labelled

#: the time over which growth is measured
_WINDOW_S = 60.0
#: tables on the page
_MAX_TABLES = 64
#: memory that grows more slowly lasts for years
_MIN_GROWTH = 1024.0


def tables(servers: Sequence[ProcessView]) -> list[dict[str, Any]]:
    """Each table over all servers, the largest first."""
    rows: Counter[str] = Counter()
    growth: dict[str, float] = {}
    sizes: dict[str, dict[str, float]] = {}
    for server in servers:
        for name, count in server.newest("table_rows").items():
            rows[name] += int(count)
            speed = server.growth(labelled("table_rows", name), _WINDOW_S)
            growth[name] = growth.get(name, 0.0) + speed
        for name, size in server.newest("table_bytes").items():
            sizes.setdefault(name, {})[server.title] = size
    found = [_table(name, rows[name], growth[name], sizes.get(name, {})) for name in rows]
    return sorted(found, key=lambda table: -table["bytes"])[:_MAX_TABLES]


def _table(name: str, rows: int, growth: float, sizes: Mapping[str, float]) -> dict[str, Any]:
    total = sum(sizes.values())
    return {
        "name": name,
        "rows": rows,
        "growth": growth * 60,
        "bytes": total,
        "servers": sizes,
        # 1: each server has the same share
        "balance": max(sizes.values()) * len(sizes) / total if total else None,
    }


def memory(
    servers: Sequence[ProcessView], hosts: Mapping[str, str], free: Mapping[str, int]
) -> list[dict[str, Any]]:
    """Free memory of the servers' hosts, and how long it lasts while tables grow as now."""
    growth: dict[str, float] = {}
    for server in servers:
        host = hosts.get(server.title, "")
        if host in free:
            growth[host] = growth.get(host, 0.0) + sum(
                server.growth(labelled("table_bytes", name), _WINDOW_S)
                for name in server.newest("table_bytes")
            )
    return [
        {
            "host": host,
            "free": free[host],
            "growth": speed,
            "hours": free[host] / speed / 3600 if speed > _MIN_GROWTH else None,
        }
        for host, speed in growth.items()
    ]
