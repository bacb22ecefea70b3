# SPDX-License-Identifier: Apache-2.0
"""Barriers: all workers enter with the same operation and receive the values of all."""

from __future__ import annotations

import pytest

from fleetlight.errors import DeadlineError, PeerError, ProtocolError
from fleetlight.ps.server.workers.barriers import Barriers


def test_every_worker_receives_the_values_of_all() -> None:
    barriers: Barriers[str] = Barriers(3)
    barriers.enter(2, 0, "gather", "c")
    barriers.enter(0, 0, "gather", "a")
    assert barriers.result(0) is None
    assert barriers.missing(0) == [1]
    barriers.enter(1, 0, "gather", "b")
    assert barriers.result(0) == ["a", "b", "c"]


def test_entering_twice_has_no_effect() -> None:
    barriers: Barriers[str] = Barriers(2)
    barriers.enter(0, 0, "gather", "a")
    barriers.enter(0, 0, "gather", "a")
    assert barriers.result(0) is None
    barriers.enter(1, 0, "gather", "b")
    # the reply was lost: worker 0 repeats its request while worker 1 is at the next barrier
    barriers.enter(1, 1, "barrier", "")
    barriers.enter(0, 0, "gather", "a")
    assert barriers.result(0) == ["a", "b"]
    barriers.enter(0, 1, "barrier", "")
    assert barriers.result(1) == ["", ""]
    assert barriers.result(0) == [], "a thread that still waits for the last barrier ends"
    with pytest.raises(
        ProtocolError, match="worker 0 entered barrier 0, but barrier 1 is complete"
    ):
        barriers.enter(0, 0, "gather", "a")


def test_different_operations_are_an_error_for_all_workers() -> None:
    barriers: Barriers[str] = Barriers(2)
    barriers.enter(0, 0, "barrier_worker", "")
    with pytest.raises(ProtocolError, match=r"worker 0 waits in 'barrier_worker'.*worker 1.*'acc'"):
        barriers.enter(1, 0, "acc", "")
    with pytest.raises(ProtocolError, match="acc"):
        barriers.result(0)
    with pytest.raises(ProtocolError, match="acc"):
        barriers.enter(1, 1, "anything", "")


def test_a_worker_that_enters_after_a_timeout_gets_the_error() -> None:
    barriers: Barriers[str] = Barriers(2)
    barriers.enter(0, 0, "save", "")
    barriers.give_up(DeadlineError("save waited 5 s for worker 1"))
    barriers.give_up(PeerError("and then this"))
    with pytest.raises(DeadlineError, match="waited 5 s for worker 1"):
        barriers.enter(1, 0, "save", "")


def test_barriers_complete_without_a_worker_that_left() -> None:
    barriers: Barriers[str] = Barriers(3)
    for worker in (0, 1):
        barriers.enter(worker, 0, "gather", "ab"[worker])
    barriers.leave(2)
    assert barriers.result(0) == ["a", "b"]
    barriers.enter(1, 1, "gather", "b")
    assert barriers.missing(1) == [0]
    # the value that it contributed stays
    barriers.leave(1)
    barriers.enter(0, 1, "gather", "a")
    assert barriers.result(1) == ["a", "b"]
    barriers.enter(0, 2, "gather", "a")
    assert barriers.result(2) == ["a"]


def test_a_prelude_stated_again_replaces_no_later_barrier() -> None:
    """A server dies while it begins a new log file, which states the prelude first."""
    barriers: Barriers[str] = Barriers(2, 3)
    barriers.restore(1, "init", ["a", "b"], is_prelude=True)
    barriers.restore(2, "gather", ["c", "d"])
    barriers.restore(1, "init", ["a", "b"], is_prelude=True)
    assert barriers.result(2) == ["c", "d"]
    assert [number for number, _, _ in barriers.prelude] == [1]
