# SPDX-License-Identifier: Apache-2.0
"""`Lookahead`: the rows of announced batches, read before the script asks for them."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from fleetlight.kernels import Deduped
from fleetlight.kernels.ids.dedup import collect
from fleetlight.ps.update import Floats, Ids
from fleetlight.ps.worker.joint_reads import Read
from fleetlight.ps.worker.reply_values import Ahead, ReplyValues


class Lookahead(Protocol):
    """One training thread announces and pushes; any thread may read rows."""

    def announce(
        self, coming: Sequence[Mapping[int, Ids]], *, at_least: int, phase: int, step: int
    ) -> None:
        """Announce the ids of the batches after the one handed out now, by table."""

    def wanted(self, optimizer: int) -> list[Ahead]:
        """The rows that the next push of an optimizer requests."""

    def whole(self, table: int, ids: Ids, at_least: int) -> tuple[Deduped, Floats] | None:
        """The distinct ids and their rows, if exactly these ids were announced."""

    def read(self, table: int, wanted: Deduped, at_least: int) -> Read:
        """Rows of distinct ids; rows that were not read ahead are fetched now."""

    def pushed(self, optimizer: int, values: ReplyValues | None = None) -> None:
        """Drop the rows that a push changed; take those of its reply, if it has arrived."""

    def forget(self) -> None:
        """Drop all rows: they may have changed without a push of this worker."""

    def stop(self) -> None:
        """Release threads."""

    def metrics(self) -> dict[str, float]:
        """Counters, if any batch was announced."""


def rows_among(
    distinct: Deduped, rows: Floats, wanted: Deduped
) -> Generator[Deduped, Floats, tuple[Floats, int]]:
    """Rows of wanted ids, found among those of other ids; missing ones are fetched and counted."""
    places = _places(wanted.ids, distinct.ids)
    here = places >= 0
    missed = len(places) - int(here.sum())
    if not missed:
        return rows[places], 0
    found = np.empty((len(places), rows.shape[1]), np.float32)
    found[here] = rows[places[here]]
    found[~here] = yield part_of(wanted, ~here)
    return found, missed


def part_of(wanted: Deduped, chosen: NDArray[np.bool_]) -> Deduped:
    """Select distinct ids; they stay grouped by server."""
    before = np.concatenate(([0], np.cumsum(chosen)))
    return Deduped(wanted.ids[chosen], np.empty(0, np.int32), before[wanted.starts])


def _places(ids: Ids, among: Ids) -> NDArray[np.int32]:
    """The position of each id among distinct ids, -1 if absent."""
    places = collect(np.concatenate((among, ids)))[1][len(among) :]
    places[places >= len(among)] = -1
    return places
