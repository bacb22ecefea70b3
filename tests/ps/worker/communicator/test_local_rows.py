# SPDX-License-Identifier: Apache-2.0
"""LocalRows: the rows that a GeoSGD worker caches, without servers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
from tests.ps.made_tables import table_plan

from fleetlight.kernels import Deduped, dedup
from fleetlight.ps.update import TableGradients
from fleetlight.ps.worker.client import Wanted
from fleetlight.ps.worker.communicator import geo
from fleetlight.ps.worker.communicator.geo import LocalRows
from fleetlight.ps.worker.joint_reads import read_together


class Servers:
    """The rows of the servers: each one is a number, three times."""

    def __init__(self) -> None:
        self.values: dict[int, float] = {}
        self.asked: list[list[int]] = []

    def fetch(self, missing: Deduped) -> Any:
        self.asked.append(sorted(missing.ids.tolist()))
        assert missing.starts[-1] == len(missing.ids)
        return np.array([[self.values.get(int(i), float(i))] * 3 for i in missing.ids], np.float32)


def make(limit: int = 100) -> tuple[LocalRows, Servers]:
    return LocalRows(table_plan(), servers=2, workers=lambda: 2, limit=limit), Servers()


def whole(rows: LocalRows, servers: Servers, wanted: Deduped, keep: bool = True) -> Any:
    def fetch(missing: Sequence[Wanted]) -> Any:
        return [servers.fetch(one.ids) for one in missing]

    [found] = read_together([Wanted(0, wanted, keep)], lambda w: rows.read(w.ids, w.insert), fetch)
    return found


def read(rows: LocalRows, servers: Servers, *ids: int, keep: bool = True) -> list[float]:
    wanted = dedup(np.array(ids), 2)
    found = whole(rows, servers, wanted, keep)
    return [float(row[0]) for row in found[wanted.inverse]]


def learn(rows: LocalRows, id_: int, gradient: float) -> None:
    grads = np.full((1, 3), gradient, np.float32)
    part = TableGradients(np.array([id_]), np.array([0, 1, 1]), grads)
    rows.learn(part, {"lr": 1.0, "momentum": 0.0}, 0)


def by_id(part: TableGradients) -> dict[int, float]:
    return {int(i): float(g[0]) for i, g in zip(part.ids, part.gradients, strict=True)}


def test_rows_are_fetched_once() -> None:
    rows, servers = make()
    assert read(rows, servers, 1, 2, 1) == [1, 2, 1]
    assert read(rows, servers, 2, 3) == [2, 3]
    assert servers.asked == [[1, 2], [3]]


def test_a_read_without_keep_caches_nothing() -> None:
    rows, servers = make()
    read(rows, servers, 1)
    learn(rows, 1, -10.0)
    assert read(rows, servers, 1, 5, keep=False) == [11, 5]
    assert len(rows) == 1
    assert by_id(rows.differences()) == {1: 5}


def test_differences_are_divided_by_the_workers_and_sent_once() -> None:
    rows, servers = make()
    read(rows, servers, 1, 2)
    learn(rows, 1, -8.0)
    part = rows.differences()
    assert by_id(part) == {1: 4, 2: 0}
    assert part.starts[-1] == 2
    # half of the progress stays visible on top of the servers' reply
    rows.take(np.array([1]), np.full((1, 3), 5.0, np.float32))
    assert read(rows, servers, 1) == [9]
    assert by_id(rows.rest()) == {1: 2, 2: 0}
    assert by_id(rows.differences()) == {}


def test_a_row_unused_for_some_windows_is_fetched_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(geo, "KEPT_WINDOWS", 1)
    rows, servers = make()
    read(rows, servers, 1)
    learn(rows, 1, -8.0)
    rows.differences()
    servers.values[1] = 100.0
    assert read(rows, servers, 1) == [9]  # in the next window: the cached value
    for _ in range(2):
        rows.differences()
    # old is 1 + 4 + 2: the servers' 100 and the unsent part, 9 - 7
    assert read(rows, servers, 1) == [102]
    assert servers.asked == [[1], [1]]


@pytest.mark.parametrize(("workers", "windows"), [(1, 4), (2, 40)])
@pytest.mark.parametrize("wire", ["bf16", "fp16", "int8"])
def test_what_a_narrow_form_drops_is_sent_later(wire: str, workers: int, windows: int) -> None:
    plan = msgspec.structs.replace(table_plan(), wire=wire)
    rows, servers = LocalRows(plan, servers=1, workers=lambda: workers, limit=100), Servers()
    servers.values[7] = 0.0
    read(rows, servers, 7)
    gradient = np.array([[1.0, 0.01234567, -0.7654321]], np.float32)
    rows.learn(TableGradients(np.array([7]), np.array([0, 1]), gradient), {"lr": 1.0}, 0)
    sent = [rows.differences().gradients[0].astype(np.float64)]
    assert (np.abs(sent[0] + gradient[0] / workers) > 1e-5).any()
    for _ in range(windows):
        read(rows, servers, 7)
        sent.append(rows.differences().gradients[0])
    np.testing.assert_allclose(np.sum(sent, axis=0), -gradient[0], atol=1e-6)


def test_a_recently_used_row_is_read_from_the_cache() -> None:
    rows, servers = make()
    read(rows, servers, 1)
    servers.values[1] = 100.0
    for _ in range(geo.KEPT_WINDOWS):
        rows.differences()
    assert read(rows, servers, 1) == [1]
    rows.differences()
    assert read(rows, servers, 1) == [1]
    for _ in range(geo.KEPT_WINDOWS + 1):
        rows.differences()
    assert read(rows, servers, 1) == [100]


def test_gradients_find_their_rows_by_any_array_of_ids() -> None:
    rows, servers = make()
    wanted = dedup(np.array([3, 4, 5]), 2)
    whole(rows, servers, wanted)
    grads = np.ones((3, 3), np.float32)
    for ids in (wanted.ids, wanted.ids.copy()):
        rows.learn(TableGradients(ids, wanted.starts, grads), {"lr": 1.0, "momentum": 0.0}, 0)
    assert read(rows, servers, 3, 4, 5, keep=False) == [1, 2, 3]


def test_gradients_of_an_evicted_row_are_dropped() -> None:
    rows, servers = make(limit=1)
    wanted = dedup(np.array([3]), 2)
    whole(rows, servers, wanted)
    rows.differences()
    read(rows, servers, 4)
    rows.differences()
    # row 5 takes the free slot of row 3
    read(rows, servers, 5)
    part = TableGradients(wanted.ids, wanted.starts, np.ones((1, 3), np.float32))
    rows.learn(part, {"lr": 1.0, "momentum": 0.0}, 0)
    assert read(rows, servers, 4, 5, keep=False) == [4, 5]


def test_the_least_recently_used_rows_are_evicted_beyond_the_limit() -> None:
    rows, servers = make(limit=2)
    for window in range(3):
        read(rows, servers, 10 + window)
        learn(rows, 10 + window, -4.0)
        sent = by_id(rows.differences())
    # 12 is of this window; 10 is evicted, and its remaining difference is sent
    assert sent == {10: 1, 12: 2}
    assert len(rows) == 2
    rows.take(np.array([10, 12]), np.full((2, 3), 5.0, np.float32))
    assert len(rows) == 2
    rows.clear()
    assert len(rows) == 0


def test_window_numbers_restart_before_they_overflow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(geo, "MAX_WINDOWS", 3)
    rows, servers = make()
    for _ in range(10):
        assert read(rows, servers, 1, 2) == [1, 2]
        learn(rows, 1, 0.0)
        assert by_id(rows.differences()) == {1: 0, 2: 0}
        assert rows.window <= 4
    assert servers.asked == [[1, 2]]


def test_an_expired_row_is_fetched_again_and_keeps_its_rule_state() -> None:
    plan = table_plan("adagrad")
    kept, fresh = (LocalRows(plan, servers=2, workers=lambda: 2, limit=100) for _ in range(2))
    servers = Servers()
    options = {"lr": 1.0, "lr_decay": 0.0, "eps": 0.0}

    def step(rows: LocalRows, gradient: float) -> None:
        part = TableGradients(
            np.array([7]), np.array([0, 1, 1]), np.full((1, 3), gradient, np.float32)
        )
        rows.learn(part, options, 0)

    read(kept, servers, 7)
    step(kept, 3.0)
    kept.expire()
    # nothing is sent twice
    assert by_id(kept.rest()) == {}
    servers.values[7] = 10.0
    assert read(kept, servers, 7) == read(fresh, servers, 7) == [10.0]
    step(kept, 4.0)
    step(fresh, 4.0)
    assert read(fresh, servers, 7) == [9.0]
    assert read(kept, servers, 7) == pytest.approx([10.0 - 4.0 / 5.0])


def test_an_expired_row_stays_expired_when_window_numbers_restart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(geo, "MAX_WINDOWS", 2)
    rows, servers = make()
    read(rows, servers, 1)
    rows.expire()
    for _ in range(4):
        read(rows, servers, 2)
        rows.differences()
    servers.values[1] = 5.0
    assert read(rows, servers, 1) == [5.0]
