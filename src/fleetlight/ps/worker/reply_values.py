# SPDX-License-Identifier: Apache-2.0
"""Rows that a worker requests, and the merged replies of all servers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from numpy.typing import NDArray

from fleetlight.kernels import Deduped
from fleetlight.ps import messages as m
from fleetlight.ps.plan import Plan
from fleetlight.ps.transport.interface import ReceivedReply
from fleetlight.ps.update import Floats, Ids
from fleetlight.ps.wire_forms import form_of

Array = NDArray[Any]


@dataclasses.dataclass(frozen=True)
class Wanted:
    """Rows requested from one table."""

    table: int
    ids: Deduped
    insert: bool


@dataclasses.dataclass
class Ahead:
    """Rows of a later batch, which a push requests; no row is inserted."""

    wanted: Wanted
    #: called with the rows, and the reply that brought them
    arrived: Callable[[Floats, ReplyValues], None]


@dataclasses.dataclass
class ReplyValues:
    """The merged replies of all servers to a pull, a push or an exchange."""

    #: rows of each request, in the order of the distinct ids
    rows: list[Floats] = dataclasses.field(default_factory=list)
    #: of an exchange: table, range of the sent ids, their rows
    pieces: list[tuple[int, slice, Floats]] = dataclasses.field(default_factory=list)
    #: dense blocks by server
    dense: dict[int, list[Array]] = dataclasses.field(default_factory=dict)
    #: by server: number of pushes applied
    versions: dict[int, int] = dataclasses.field(default_factory=dict)
    #: applied steps of the slowest worker, over all servers
    slowest: int = 0
    applied: bool = True
    #: the square of the norm of held gradients, over all servers
    square: float = 0.0
    #: (server, batch, table, positions, rows) of prefetched rows that a step changed
    changed: list[tuple[int, int, int, Array, Array]] = dataclasses.field(default_factory=list)
    #: by table that the push asked for: ids that other workers changed, from each server
    outdated: dict[int, list[Ids]] = dataclasses.field(default_factory=dict)


def merged_versions(replies: Mapping[int, ReceivedReply]) -> ReplyValues:
    """The values without arrays: versions, and the steps of the slowest worker."""
    values = ReplyValues()
    slowest = []
    for server, reply in replies.items():
        message = reply.message
        assert isinstance(message, (m.Pulled, m.Pushed, m.GeoExchangeReply)), message
        values.versions[server] = message.version
        slowest.append(message.slowest)
    values.slowest = min(slowest, default=0)
    return values


def outdated_ids(replies: Mapping[int, ReceivedReply]) -> dict[int, list[Ids]]:
    """Take the ids that other workers changed, which are the last arrays of each reply."""
    found: dict[int, list[Ids]] = {}
    for reply in replies.values():
        message = reply.message
        assert isinstance(message, m.Pushed), message
        first = len(reply.arrays) - len(message.outdated)
        for table, ids in zip(message.outdated, reply.arrays[first:], strict=True):
            found.setdefault(table, []).append(ids)
        del reply.arrays[first:]
    return found


def changed_rows(
    replies: Mapping[int, ReceivedReply], plan: Plan
) -> list[tuple[int, int, int, Array, Array]]:
    """Take the changed rows, which are the last arrays then."""
    found = []
    for server, reply in replies.items():
        message = reply.message
        assert isinstance(message, m.Pushed), message
        forms = [form_of(plan.tables[table]) for table in message.changed]
        first = len(reply.arrays) - sum(1 + len(form.arrays) for form in forms)
        arrays = iter(reply.arrays[first:])
        del reply.arrays[first:]
        for table, batch, form in zip(message.changed, message.batches, forms, strict=True):
            positions = next(arrays)
            rows = form.decode([next(arrays) for _ in form.arrays])
            found.append((server, batch, table, positions, rows))
    return found
