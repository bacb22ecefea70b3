# SPDX-License-Identifier: Apache-2.0
"""Barriers: all come with the same operation, and get what everybody brought."""

from __future__ import annotations

import pytest

from fleetlight.errors import DeadlineError, PeerError, ProtocolError
from fleetlight.ps.server.workers.barriers import Barriers


def test_everybody_gets_what_all_brought() -> None:
    meetings: Barriers[str] = Barriers(3)
    meetings.enter(2, 0, "gather", "c")
    meetings.enter(0, 0, "gather", "a")
    assert meetings.result(0) is None
    assert meetings.missing(0) == [1]
    meetings.enter(1, 0, "gather", "b")
    assert meetings.result(0) == ["a", "b", "c"]


def test_coming_again_changes_nothing() -> None:
    meetings: Barriers[str] = Barriers(2)
    meetings.enter(0, 0, "gather", "a")
    meetings.enter(0, 0, "gather", "a")
    assert meetings.result(0) is None
    meetings.enter(1, 0, "gather", "b")
    # the answer was lost on its way: somebody asks again, while the other is further
    meetings.enter(1, 1, "barrier", "")
    meetings.enter(0, 0, "gather", "a")
    assert meetings.result(0) == ["a", "b"]
    meetings.enter(0, 1, "barrier", "")
    assert meetings.result(1) == ["", ""]
    with pytest.raises(
        ProtocolError, match="worker 0 entered barrier 0, but barrier 1 is complete"
    ):
        meetings.enter(0, 0, "gather", "a")


def test_different_operations_are_an_error_for_all() -> None:
    meetings: Barriers[str] = Barriers(2)
    meetings.enter(0, 0, "barrier_worker", "")
    with pytest.raises(ProtocolError, match=r"worker 0 waits in 'barrier_worker'.*worker 1.*'acc'"):
        meetings.enter(1, 0, "acc", "")
    with pytest.raises(ProtocolError, match="acc"):
        meetings.result(0)
    with pytest.raises(ProtocolError, match="acc"):
        meetings.enter(1, 1, "anything", "")


def test_who_comes_after_somebody_gave_up_is_told() -> None:
    meetings: Barriers[str] = Barriers(2)
    meetings.enter(0, 0, "save", "")
    meetings.give_up(DeadlineError("save waited 5 s for worker 1"))
    meetings.give_up(PeerError("and then this"))
    with pytest.raises(DeadlineError, match="waited 5 s for worker 1"):
        meetings.enter(1, 0, "save", "")


def test_the_others_meet_without_one_that_is_gone() -> None:
    meetings: Barriers[str] = Barriers(3)
    for worker in (0, 1):
        meetings.enter(worker, 0, "gather", "ab"[worker])
    meetings.leave(2)
    assert meetings.result(0) == ["a", "b"]
    meetings.enter(1, 1, "gather", "b")
    assert meetings.missing(1) == [0]
    # what it had brought stays
    meetings.leave(1)
    meetings.enter(0, 1, "gather", "a")
    assert meetings.result(1) == ["a", "b"]
    meetings.enter(0, 2, "gather", "a")
    assert meetings.result(2) == ["a"]
