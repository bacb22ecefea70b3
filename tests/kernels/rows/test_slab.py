# SPDX-License-Identifier: Apache-2.0
"""Growth of slabs with and without reserved memory."""

import pytest

from fleetlight.errors import ConfigError
from fleetlight.kernels.rows import memory, slab
from fleetlight.kernels.rows.slab import TOP, Slab


@pytest.fixture
def unreserved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "reserve", lambda count, dtype: None)


@pytest.mark.usefixtures("unreserved")
def test_growth_keeps_rows_and_homes() -> None:
    rows = Slab(3)
    rows.counters[TOP] = rows.capacity
    rows.rows[:] = 7
    rows.homes[:] = 9
    before = rows.capacity
    rows.grow()
    assert rows.capacity == before * 3 // 2
    assert (rows.rows == 7).all()
    assert len(rows.rows) == before
    assert (rows.homes[:before] == 9).all()
    assert not rows.flat[before * 3 :].any()


@pytest.mark.usefixtures("unreserved")
def test_a_full_table_refuses_to_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slab, "MAX_ROWS", 1024)
    with pytest.raises(ConfigError, match="a table of 1024 rows is full: use more servers"):
        Slab(1).grow()


def test_reserved_slab_has_capacity_for_the_whole_memory() -> None:
    rows = Slab(32)
    assert rows.capacity * 128 >= memory.worth_reserving() - 128
    assert rows.nbytes == 0
