# SPDX-License-Identifier: Apache-2.0
"""Rows that a worker requests, and the merged replies of all servers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from numpy.typing import NDArray

from fleetlight.kernels import Deduped
from fleetlight.ps.update import Floats, Ids

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
