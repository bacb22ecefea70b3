# SPDX-License-Identifier: Apache-2.0
"""The record of a pass: when a job needs the pass, and its position."""

from __future__ import annotations

import dataclasses
import graphlib
from collections.abc import Callable, Iterable

from torch import nn

from fleetlight.collective.data_parallel.replica import Reduction
from fleetlight.collective.routes.levels import Groups
from fleetlight.errors import PlanError, did_you_mean
from fleetlight.static.graph.form import Pass
from fleetlight.strategy import DistributedStrategy


@dataclasses.dataclass(frozen=True)
class PassRequest:
    """The properties of a job that select passes."""

    strategy: DistributedStrategy
    model: nn.Module
    #: parameter servers store the tables and make the steps
    with_servers: bool = False
    #: how the workers reduce gradients; None if they reduce none
    reduction: Reduction | None = None
    #: the groups of a hierarchical all-reduce; empty for a flat one
    levels: tuple[Groups, ...] = ()
    #: workers train alone for some steps and then average parameters
    trains_alone: bool = False

    @property
    def goes_by_levels(self) -> bool:
        """Whether all-reduces are hierarchical."""
        return bool(self.levels) and self.reduction is not None and self.reduction.inner is not None


@dataclasses.dataclass(frozen=True)
class PassRecord:
    """`wanted` returns the pass for a job, or None.

    `after` and `before` name passes; a name that a program does not have has no effect.
    """

    name: str
    wanted: Callable[[PassRequest], Pass | None]
    after: tuple[str, ...] = ()
    before: tuple[str, ...] = ()


def in_order(records: Iterable[PassRecord]) -> tuple[PassRecord, ...]:
    """The records sorted by `after` and `before`, in the same order in all processes."""
    named = {record.name: record for record in sorted(records, key=lambda record: record.name)}
    # lists: the order of a set of strings differs between processes
    graph: dict[str, list[str]] = {name: [] for name in named}
    for record in named.values():
        for other in (*record.after, *record.before):
            if other not in named:
                raise PlanError(f"pass {record.name!r}: {other!r}: {did_you_mean(other, named)}")
        graph[record.name].extend(record.after)
        for other in record.before:
            graph[other].append(record.name)
    try:
        return tuple(named[name] for name in graphlib.TopologicalSorter(graph).static_order())
    except graphlib.CycleError as error:
        circle = " -> ".join(error.args[1])
        raise PlanError(
            f"passes form a cycle: {circle}; change `after` or `before` in one of their files"
        ) from None
