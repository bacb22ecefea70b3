# SPDX-License-Identifier: Apache-2.0
"""Which worker slows the others, and in which part of its steps. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from fleetlight.dashboard.view.process_view import WAITING
from fleetlight.observe.telemetry.catalogue import STEP_PARTS

#: how much slower than the others a worker must be
_SLOWER = 1.25
_BUSY = [i for i, part in enumerate(STEP_PARTS) if part not in WAITING]


def straggler(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """The slowest of running workers; None if none is clearly slower than the others.

    Workers that wait for each other take the same time for a step. The slow one waits least, so
    the time in which workers are busy decides. Where workers do not wait, a push may be slow, too.
    """
    found = [row for row in rows if row["kind"] == "worker" and "parts" in row]
    if len(found) < 2:
        return None
    return _slowest(found, range(len(STEP_PARTS))) or _slowest(found, _BUSY)


def _slowest(rows: Sequence[Mapping[str, Any]], parts: Sequence[int]) -> dict[str, Any] | None:
    times = [sum(row["parts"][i] for i in parts) for row in rows]
    slowest = max(range(len(rows)), key=times.__getitem__)
    others = [i for i in range(len(rows)) if i != slowest]
    usual = median(times[i] for i in others)
    if times[slowest] < _SLOWER * usual:
        return None
    typical = {i: median(rows[j]["parts"][i] for j in others) for i in parts}
    own = rows[slowest]["parts"]
    part = max(parts, key=lambda i: own[i] - typical[i])
    return {
        "name": rows[slowest]["name"],
        "times": times[slowest] / usual if usual else None,
        "part": STEP_PARTS[part],
        "seconds": own[part],
        "others": typical[part],
        #: True: the others are as slow, since they wait for it
        "holds": len(parts) < len(STEP_PARTS),
    }
