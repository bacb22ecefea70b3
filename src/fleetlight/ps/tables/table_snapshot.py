# SPDX-License-Identifier: Apache-2.0
"""`TableSnapshot`: what the two kinds of snapshots have in common."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from fleetlight.ps.tables.ordered_snapshot import Lock
from fleetlight.ps.tables.table_file import Pause, no_pause
from fleetlight.ps.update import Floats, Ids


class TableSnapshot(Protocol):
    """The rows of a table at one moment: an `OrderedSnapshot` or an `UnorderedSnapshot`."""

    @property
    def starts(self) -> NDArray[np.int64] | None:
        """The start of each bucket, after `prepare`; None: rows are in no order."""

    @property
    def nbytes(self) -> int:
        """Bytes of memory in use, without the table."""

    @property
    def removed(self) -> Ids | None:
        """The ids that lost their row since the base; None: it has all rows, and needs no base."""

    def __len__(self) -> int:
        """The number of rows at the cut."""

    def keep(self, numbers: NDArray[np.integer], ids: Ids | None = None) -> None:
        """Keep rows in use before they change."""

    def make_room(self) -> None:
        """Allocate memory for rows that will change."""

    def prepare(self, lock: Lock, pause: Pause = no_pause) -> None:
        """Prepare the order in which rows are read."""

    def pieces(self, lock: Lock) -> Iterator[tuple[Ids, Floats]]:
        """All rows, with their ids; a piece is valid until the next is read."""
