# SPDX-License-Identifier: Apache-2.0
"""Reads of several tables fetch their missing rows together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from fleetlight.kernels import dedup
from fleetlight.ps.worker.client import Wanted
from fleetlight.ps.worker.joint_reads import Read, read_together

WANTED = [Wanted(table, dedup(np.array([table, 9])), True) for table in (3, 1, 2)]


class Reads:
    """Tables without rows; table 1 has all rows. Counts reads that have not ended."""

    def __init__(self) -> None:
        self.open = 0
        self.fetched: list[list[int]] = []

    def read(self, wanted: Wanted) -> Read:
        self.open += 1
        try:
            if wanted.table == 1:
                return np.zeros((2, 1), np.float32)
            return (yield wanted.ids) * 10
        finally:
            self.open -= 1

    def fetch(self, missing: Sequence[Wanted]) -> Any:
        assert self.open == len(missing)
        self.fetched.append([one.table for one in missing])
        return [one.ids.ids[:, None].astype(np.float32) for one in missing]


def test_missing_rows_of_all_tables_are_fetched_once() -> None:
    reads = Reads()
    rows = read_together(WANTED, reads.read, reads.fetch)
    assert [one[:, 0].tolist() for one in rows] == [[30, 90], [0, 0], [20, 90]]
    assert reads.fetched == [[3, 2]]
    read_together(WANTED[1:2], reads.read, reads.fetch)
    assert (reads.fetched, reads.open) == ([[3, 2]], 0)


def test_a_failed_fetch_ends_all_reads() -> None:
    reads = Reads()

    def fail(missing: Any) -> Any:
        raise ConnectionError("lost")

    with pytest.raises(ConnectionError, match="lost"):
        read_together(WANTED, reads.read, fail)
    assert reads.open == 0
