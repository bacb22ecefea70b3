# SPDX-License-Identifier: Apache-2.0
"""Threads of a server that wait for workers wake once, not for each request of another worker."""

from __future__ import annotations

import concurrent.futures
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tests.ps.serving import Worker, opened, plan, team

from fleetlight.errors import FleetError
from fleetlight.ps import messages as m
from fleetlight.ps.server.workers import presence

WORKERS = 4
DEADLINE_S = 20.0


class Waits:
    """Counts the waits of the threads of a pool, and the notifications that ended them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.notified = 0
        self._began = threading.Semaphore(0)
        wait = threading.Condition.wait

        def counted(condition: threading.Condition, timeout: float | None = None) -> bool:
            if not threading.current_thread().name.startswith("worker"):
                return wait(condition, timeout)
            self._began.release()
            is_notified = wait(condition, timeout)
            self.notified += is_notified
            return is_notified

        monkeypatch.setattr(threading.Condition, "wait", counted)
        # a wait that times out is not notified
        monkeypatch.setattr(presence, "_LOOK_EVERY_S", 60.0)

    def begin(self, count: int) -> None:
        """Return once that many waits have begun; the next holder of their lock finds them."""
        for _ in range(count):
            assert self._began.acquire(timeout=DEADLINE_S)


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> Waits:
    return Waits(monkeypatch)


@pytest.fixture
def pool() -> Iterator[concurrent.futures.ThreadPoolExecutor]:
    with concurrent.futures.ThreadPoolExecutor(WORKERS, "worker") as made:
        yield made


def ended(calls: list[concurrent.futures.Future[Any]]) -> None:
    for call in calls:
        call.result(DEADLINE_S)


def refused(call: Callable[[], object]) -> None:
    with pytest.raises(FleetError):
        call()


def test_a_step_wakes_each_waiting_worker_once(
    waits: Waits, pool: concurrent.futures.ThreadPoolExecutor
) -> None:
    *others, last = team(opened(plan(workers=WORKERS)), WORKERS)
    calls = [pool.submit(worker.push, 0, {0: ([1], [1])}) for worker in others]
    waits.begin(len(others))
    for _ in range(5):
        # the end of this request is no news for the others
        refused(lambda: last.push(0, optimizer=9))
        last.greet("pull")
    last.push(0, {0: ([1], [1])})
    ended(calls)
    assert waits.notified == len(others)


def test_a_barrier_wakes_each_waiting_worker_once(
    waits: Waits, pool: concurrent.futures.ThreadPoolExecutor
) -> None:
    *others, last = team(opened(plan(workers=WORKERS)), WORKERS)
    calls = []
    for worker in others:
        calls.append(pool.submit(worker.say, m.Barrier(0, "a barrier", 20.0)))
        waits.begin(1)
    last.say(m.Barrier(0, "a barrier", 20.0))
    ended(calls)
    assert waits.notified == len(others)


def test_pushes_wake_no_barrier(waits: Waits, pool: concurrent.futures.ThreadPoolExecutor) -> None:
    first, second = team(opened(plan("async")))
    call = pool.submit(first.say, m.Barrier(0, "a barrier", 20.0))
    waits.begin(1)
    for step in range(5):
        second.push(step, {0: ([1], [1])})
    second.say(m.Barrier(0, "a barrier", 20.0))
    ended([call])
    assert waits.notified == 1


def test_a_pull_waits_for_pushes_and_leaving_workers(
    waits: Waits, pool: concurrent.futures.ThreadPoolExecutor
) -> None:
    first, second, third = team(opened(plan("async", workers=3)), 3)
    first.push(0)
    wanted = m.Pull([], dense=False, at_least=1)
    call = pool.submit(first.say, wanted, lane="pull")
    waits.begin(1)
    second.push(0)
    waits.begin(1)
    third.say(m.EndPhase(0))
    ended([call])
    assert waits.notified == 2


@pytest.mark.parametrize("kind", ["step", "barrier", "pull"])
def test_a_failed_worker_ends_every_wait(
    kind: str, waits: Waits, pool: concurrent.futures.ThreadPoolExecutor
) -> None:
    first, second = team(opened(plan("sync" if kind == "step" else "async")))
    calls: dict[str, Callable[[Worker], object]] = {
        "step": lambda worker: worker.push(0),
        "barrier": lambda worker: worker.say(m.Barrier(0, "a barrier", 20.0)),
        "pull": lambda worker: worker.say(m.Pull([], dense=False, at_least=1)),
    }
    call = pool.submit(calls[kind], first)
    waits.begin(1)
    second.say(m.Leave("it failed"))
    with pytest.raises(FleetError, match="it failed"):
        call.result(DEADLINE_S)
    assert waits.notified == 1
