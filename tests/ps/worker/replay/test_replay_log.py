# SPDX-License-Identifier: Apache-2.0
"""ReplayLog: a restarted worker receives the replies that its predecessor received."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from fleetlight.errors import ConfigError
from fleetlight.ps.worker.replay.replay_log import LoggedReply, ReplayLog, may_be_made_again


class RecordedCalls:
    """The records of logged calls, and replay logs of later incarnations that read them."""

    def __init__(self) -> None:
        self.written: list[tuple[LoggedReply, Sequence[bytes]]] = []

    def restart(self) -> ReplayLog:
        log = ReplayLog(lambda call, reply: self.written.append((call, reply)))
        for call, reply in list(self.written):
            log.remember(call, reply)
        return log


def call_once(log: ReplayLog, name: str, reply: bytes) -> Sequence[bytes]:
    def act() -> list[bytes]:
        log.meetings += 1
        return [reply]

    return log.once(name, act)


def test_logged_replies_are_replayed_before_new_calls() -> None:
    recorded = RecordedCalls()
    first = recorded.restart()
    assert [call_once(first, "a", b"1"), call_once(first, "b", b"2")] == [[b"1"], [b"2"]]
    second = recorded.restart()
    assert second.is_known
    assert [call_once(second, "a", b"x"), call_once(second, "b", b"x")] == [[b"1"], [b"2"]]
    assert second.meetings == 2
    assert not second.is_known
    assert call_once(second, "c", b"3") == [b"3"]
    third = recorded.restart()
    assert [call_once(third, name, b"x") for name in "abc"] == [[b"1"], [b"2"], [b"3"]]


def test_nested_calls_are_part_of_the_outer_call() -> None:
    recorded = RecordedCalls()
    first = recorded.restart()

    def load() -> list[bytes]:
        call_once(first, "look", b"1")
        call_once(first, "load", b"2")
        return [b"all"]

    first.once("load_persistables", load)
    call_once(first, "b", b"3")
    second = recorded.restart()
    assert second.once("load_persistables", lambda: pytest.fail("again")) == [b"all"]
    assert second.meetings == 2
    assert call_once(second, "b", b"x") == [b"3"]


def test_replay_starts_at_the_position_of_the_script() -> None:
    recorded = RecordedCalls()
    first = recorded.restart()
    for name in "abcde":
        call_once(first, name, name.encode())
    second = recorded.restart()
    call_once(second, "a", b"x")
    second.go_on(3, 3)
    assert [call_once(second, "d", b"x"), call_once(second, "e", b"x")] == [[b"d"], [b"e"]]
    assert [n for n in range(6) if may_be_made_again(n, prelude=1, since=3)] == [0, 3, 4, 5]


def test_a_different_script_is_refused() -> None:
    recorded = RecordedCalls()
    call_once(recorded.restart(), "barrier_worker", b"")
    with pytest.raises(ConfigError, match="called 'all_gather' where it called 'barrier_w"):
        call_once(recorded.restart(), "all_gather", b"")
