# SPDX-License-Identifier: Apache-2.0
"""Format predictions as a table, and as values for JSON; pure."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import msgspec

from fleetlight.launch.capacity.goodput import Goodput
from fleetlight.launch.capacity.prediction import Prediction
from fleetlight.launch.capacity.profile import Profile, Workload
from fleetlight.observe.console import aligned

_GIB, _MIB = 2**30, 2**20


def of_workload(work: Workload) -> str:
    """One line: what a step costs with one server."""
    cpu = [1e3 * line.at(1) for line in (work.worker_cpu_s, work.server_cpu_s)]
    sent = sum(lane.sent.at(1) for lane in work.lanes.values()) / _MIB
    received = sum(lane.received.at(1) for lane in work.lanes.values()) / _MIB
    batch = "batch not known" if work.batch is None else f"batch {work.batch:.0f}"
    return (
        f"{work.mode}, {batch}; a step: {cpu[0]:.3g} ms CPU of a worker, {cpu[1]:.3g} ms of the "
        f"servers; {sent:.3g} MiB sent, {received:.3g} MiB received"
    )


def of_predictions(predictions: Sequence[Prediction], columns: int | None = None) -> str:
    """A row for each layout."""
    knows = all(one.examples_per_s is not None for one in predictions)
    head = ["workers", "servers", "examples/s" if knows else "steps/s", "limit"]
    head += ["worker CPU", "server CPU", "server link", "server memory"]
    return aligned([head, *(_row(one, knows) for one in predictions)], columns)


def _row(one: Prediction, knows: bool) -> list[str]:
    rate = one.examples_per_s if knows else one.steps_per_s
    assert rate is not None
    row = [str(one.layout.workers), str(one.layout.servers)]
    row += [f"{rate:,.0f}" if rate >= 1000 else f"{rate:.4g}", one.limit]
    link = max(one.use["link of a server"], one.use["link of a server, replies"])
    row += [f"{share:.0%}" for share in (one.use["worker CPU"], one.use["server CPU"], link)]
    return [*row, f"{one.server_bytes / _GIB:.2f} GiB"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class JobGoodput:
    """The goodput of one layout, for one rate of failures."""

    workers: int
    servers: int
    #: a process fails once in so many days
    mtbf_days: int
    goodput: Goodput


def of_goodput(found: Sequence[JobGoodput], columns: int | None = None) -> str:
    """A row for each layout and rate of failures."""
    head = ["workers", "servers", "a failure in", "failures/h", "with checkpoints", "every"]
    return aligned([[*head, "with a log"], *map(_goodput_row, found)], columns)


def _goodput_row(one: JobGoodput) -> list[str]:
    goodput = one.goodput
    return [
        str(one.workers),
        str(one.servers),
        f"{one.mtbf_days} days",
        f"{goodput.failures_per_h:.3g}",
        f"{goodput.with_checkpoints:.1%}",
        f"{goodput.checkpoint_every_s:.0f} s",
        f"{goodput.with_log:.1%}",
    ]


def as_values(
    measured: Profile, differences: Sequence[str], predictions: Sequence[Prediction]
) -> dict[str, Any]:
    """What JSON has: the machine, how it differs from this one, the workload, all predictions."""
    return {
        "machine": msgspec.to_builtins(measured.machine),
        "differences": list(differences),
        "other_programs": measured.other_programs,
        "workload": msgspec.to_builtins(measured.workload),
        "predictions": [_values(one) for one in predictions],
    }


def _values(one: Prediction) -> dict[str, Any]:
    values = dataclasses.asdict(one)
    if math.isinf(one.layout.link_bits_per_s):
        # JSON has no infinite numbers
        values["layout"]["link_bits_per_s"] = None
    return values
