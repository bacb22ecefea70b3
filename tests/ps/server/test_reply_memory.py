# SPDX-License-Identifier: Apache-2.0
"""Replies are written in the memory that a connection gives; they are those without it."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import numpy as np
import pytest
from tests.ps.serving import Worker, ids_of, opened, plan, rows_of, team, together

from fleetlight.ps import messages as m
from fleetlight.ps.plan import BF16, FP32, Plan
from fleetlight.ps.transport.interface import Connection
from fleetlight.ps.wire_forms import FORMS, FP16, INT8, encoded

IDS = [5, -3, 1 << 40, 5000]
WIRES = [FP32, BF16, FP16, INT8]


class Given:
    """The memory that a connection gives, up to a number of arrays."""

    def __init__(self, most: int = 1000) -> None:
        self.most = most
        self.arrays: list[Any] = []

    def output(self, shape: tuple[int, ...], dtype: str) -> Any:
        if len(self.arrays) == self.most:
            return None
        self.arrays.append(np.full(shape, 77, dtype))
        return self.arrays[-1]


def narrow(mode: str, wire: str) -> Plan:
    made = plan(mode, workers=1)
    return msgspec.structs.replace(
        made, tables=[msgspec.structs.replace(table, wire=wire) for table in made.tables]
    )


def worker_of(the_plan: Plan, given: Given | None) -> Worker:
    """The only worker of a new server."""
    worker = Worker(opened(the_plan), 0, workers=1)
    if given is not None:
        for lane in worker.lanes:
            worker.lanes[lane] = Connection(lane, output=given.output)
            worker.greet(lane)
    return worker


def pull(worker: Worker) -> list[Any]:
    message = m.Pull([m.TablePull(0, True), m.TablePull(1, False)], dense=True)
    return worker.say(message, ids_of(IDS), ids_of(IDS[:2]), lane="pull")[1]


def filled(worker: Worker) -> None:
    """Values that no form rounds."""
    arrays = [ids_of(IDS), rows_of([1, -2, 127, 0.5]), np.array([3, 4, 5], np.float32)]
    worker.say(m.Fill([0], dense=True), *arrays)


def push(worker: Worker) -> list[Any]:
    """A push whose reply has rows of a later batch and dense values."""
    message = worker.push_request(0, {}, [1, 2, 4], ahead=[0, 1])
    dense = np.array([1, 2, 4], np.float32)
    return worker.say(message, dense, ids_of(IDS), ids_of(IDS[:2]), lane="push")[1]


def exchange(worker: Worker) -> list[Any]:
    message = m.GeoExchange(1, 0, 0, [0], True, wants=True, more=False)
    assert worker.server._service is not None
    differences = encoded(rows_of([1, 1, 2, 4]), worker.server._service.state.plan.tables[0])
    return worker.say(message, ids_of(IDS), *differences, np.ones(3, np.float32), lane="push")[1]


CASES = [("async", pull), ("sync", pull), ("sync", push), ("async", push), ("geo", exchange)]


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize(("mode", "ask"), CASES)
def test_replies_are_in_the_memory_of_the_connection(mode: str, ask: Any, wire: str) -> None:
    given = Given()
    expected, found = (ask(worker) for worker in two_workers(narrow(mode, wire), given))
    assert len(found) == len(given.arrays)
    for array, memory, other in zip(found, given.arrays, expected, strict=True):
        assert np.may_share_memory(array, memory)
        assert (array.shape, array.dtype) == (memory.shape, memory.dtype)
        np.testing.assert_array_equal(array, other)


@pytest.mark.parametrize("most", [0, 1, 2])
@pytest.mark.parametrize(("mode", "ask"), CASES)
def test_replies_need_no_memory_of_the_connection(mode: str, ask: Any, most: int) -> None:
    expected, found = (ask(w) for w in two_workers(narrow(mode, INT8), Given(most)))
    for array, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(array, other)


def two_workers(the_plan: Plan, given: Given) -> list[Worker]:
    workers = [worker_of(the_plan, None), worker_of(the_plan, given)]
    for worker in workers:
        filled(worker)
    return workers


def test_replies_to_a_step_of_several_workers_share_a_copy_of_the_dense_values() -> None:
    server = opened(plan("sync", workers=2))
    workers, given = team(server), Given()
    for worker in workers:
        worker.lanes["push"] = Connection("push", output=given.output)
        worker.greet("push")
    replies = together(*(lambda w=w: w.push(0, dense=[1, 2, 4])[1] for w in workers))
    assert replies[0][0] is replies[1][0]
    assert not given.arrays


def test_dense_values_are_shared_only_without_memory() -> None:
    """A connection's memory is overwritten by its next reply."""
    worker = worker_of(plan("async", workers=1), given := Given(1))
    assert worker.dense() == [1, 1, 1]
    given.arrays[0][:] = 0
    shared = worker.say(m.Pull([], dense=True), lane="pull")[1][0]
    assert shared.tolist() == [1, 1, 1]
    again = worker.say(m.Pull([], dense=True), lane="pull")[1][0]
    assert again is shared


def test_a_repeated_push_has_the_reply_of_the_first() -> None:
    worker = worker_of(plan("sync", workers=1), Given())
    filled(worker)
    message = worker.push_request(0, {}, [1, 2, 4])
    dense = np.array([1, 2, 4], np.float32)
    first = worker.say(message, dense, lane="push")[1][0].copy()
    worker.lanes["push"] = Connection("push", output=Given().output)
    worker.greet("push")
    np.testing.assert_array_equal(worker.say(message, dense, lane="push")[1][0], first)
    assert first.tolist() == [2, 2, 1]


@pytest.mark.parametrize("wire", WIRES)
def test_values_that_are_not_finite_arrive_so(wire: str) -> None:
    worker = worker_of(narrow("async", wire), given := Given())
    bad = rows_of([np.nan, np.inf, -np.inf, 127])
    bad[:3, 1] = 1
    worker.say(m.Fill([0], dense=False), ids_of(IDS), bad)
    pulled = worker.say(m.Pull([m.TablePull(0, True)], False), ids_of(IDS), lane="pull")[1]
    assert len(pulled) == len(given.arrays)
    found = FORMS[wire].decode(pulled)
    # a row of int8 has one scale
    expected = np.where(np.isfinite(bad).all(axis=1, keepdims=True), bad, np.nan)
    np.testing.assert_array_equal(found, expected if wire == INT8 else bad)


def test_ids_that_a_peer_changes_meanwhile_damage_no_index() -> None:
    """Arrays may be memory that a worker still writes to."""
    worker = worker_of(plan("async", workers=1), None)
    ids, rows = np.arange(50_000), np.ones((50_000, 2), np.float32)
    stop = threading.Event()

    def write_nonsense() -> None:
        random = np.random.default_rng(0)
        while not stop.is_set():
            ids[:] = random.integers(-(2**62), 2**62, len(ids))

    with ThreadPoolExecutor(1) as pool:
        pool.submit(write_nonsense)
        try:
            for step in range(10):
                message = worker.push_request(step, {0: None}, None)
                worker.say(message, ids, rows, lane="push")
        finally:
            stop.set()
    assert worker.server._service is not None
    table = worker.server._service.state.table(0)
    known = table._rows.ids_of(table._rows.numbers)
    assert len(np.unique(known)) == len(known) == len(table)
    np.testing.assert_array_equal(table._rows.find(known), table._rows.numbers)
