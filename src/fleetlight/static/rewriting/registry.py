# SPDX-License-Identifier: Apache-2.0
"""The record that a pass's file declares: when a job wants the pass, and where it stands."""

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
    """What a job says about a program before it runs."""

    strategy: DistributedStrategy
    model: nn.Module
    #: parameter servers keep the tables and make the steps
    with_servers: bool = False
    #: how the workers reduce gradients; None where they reduce none
    reduction: Reduction | None = None
    #: the groups that sum level by level; empty where all workers sum at once
    levels: tuple[Groups, ...] = ()
    #: workers train alone for some steps, and then take means of parameters
    trains_alone: bool = False

    @property
    def goes_by_levels(self) -> bool:
        """Whether buckets are summed level by level."""
        return bool(self.levels) and self.reduction is not None and self.reduction.inner is not None


@dataclasses.dataclass(frozen=True)
class PassRecord:
    """`wanted` makes the pass that a job asks for, or returns None.

    `after` and `before` name passes; they say nothing where a program has no such pass.
    """

    name: str
    wanted: Callable[[PassRequest], Pass | None]
    after: tuple[str, ...] = ()
    before: tuple[str, ...] = ()


def in_order(records: Iterable[PassRecord]) -> tuple[PassRecord, ...]:
    """The records so that each stands where it says, in one order for all processes."""
    named = {record.name: record for record in sorted(records, key=lambda record: record.name)}
    # lists, since the order of a set of texts differs between processes
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
            f"passes stand in a circle: {circle}; change `after` or `before` in one of their files"
        ) from None
